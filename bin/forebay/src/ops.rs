//! Operations on the engine, each defined once: its HTTP request and its implementation.
//!
//! The command line sends an operation to the daemon or runs it on its own engine; the daemon's HTTP handlers build
//! the same operations from requests.  So both paths behave identically.

mod cache;
mod clones;
mod config;
mod gateways;
mod groups;
mod logs;
mod manage;
mod map;
mod namespaces;
mod snapshots;
mod store;
mod trash;

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::api;
use crate::engine::Engine;
use crate::failure::Result;
use crate::spec::{ImageSpec, SourceSpec, source_spec, uri_encode};
pub use cache::{ClearReadCache, GetReadCache};
pub use clones::{CloneSnapshot, Flatten, ListChildren};
pub use config::{ChangeOption, ConfigTarget, GetOption, ListOptions};
pub use gateways::{
    CreateGatewayGroup, DrainGatewayMember, GetGatewayGroup, JoinGatewayGroup, LeaveGatewayGroup, RebalanceGateways,
    RemoveGatewayGroup, SetGatewayPolicy, SetGatewayWeight,
};
pub use groups::{
    AddToGroup, CreateGroup, CreateGroupSnapshot, ListGroupImages, ListGroupSnapshots, ListGroups, RemoveFromGroup,
    RemoveGroup, RemoveGroupSnapshot, RenameGroup, RenameGroupSnapshot, RollBackGroup,
};
pub use logs::{DiscardLog, FlushLog, GetLog, ListLogs, TakeOverLog};
pub use manage::{
    AddLock, CheckObjectMap, GetMetadata, ListLocks, ListMetadata, RebuildObjectMap, RemoveLock, SetMetadata, Sparsify,
    UpdateFeatures,
};
pub use map::{ListMapped, MapImage, MappedTarget, UnmapImage};
pub use namespaces::{CreateNamespace, ListNamespaces, RemoveNamespace};
pub use snapshots::{
    CreateSnapshot, ListSnapshots, PurgeSnapshots, RemoveSnapshot, RemoveSnapshotById, RollBack, SetSnapshotLimit,
    UpdateSnapshot,
};
pub use store::{
    AddStoreDevices, GetScrub, GetStoreKeys, GrowStore, ListStoreDevices, RemoveStoreDevices, ReplaceStoreDevice,
    RotateMasterKey, StartScrub,
};
pub use trash::{ListTrash, MoveToTrash, PurgeTrash, RemoveFromTrash, RestoreFromTrash};

/// HTTP request of an operation.
pub struct HttpRoute {
    /// HTTP method.
    pub method: &'static str,
    /// Path and query.
    pub target: String,
    /// JSON body.
    pub body: Option<String>,
}

impl HttpRoute {
    fn new(method: &'static str, target: impl Into<String>) -> Self {
        Self { method, target: target.into(), body: None }
    }

    fn json(mut self, body: &impl Serialize) -> Self {
        self.body = Some(serde_json::to_string(body).expect("plain data becomes JSON"));
        self
    }
}

/// Time between two reports of progress: each wakes a thread of the control plane, which costs the reactor more than the
/// work on an object does.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Progress reporter of an operation; only the latest state is kept for the reader.
#[derive(Clone)]
pub struct ProgressSink {
    told: watch::Sender<Option<api::Progress>>,
    last: Cell<Option<Instant>>,
}

impl ProgressSink {
    /// Creates a reporter, and a receiver for its states.
    pub fn channel() -> (Self, watch::Receiver<Option<api::Progress>>) {
        let (told, receiver) = watch::channel(None);
        (Self { told, last: Cell::new(None) }, receiver)
    }

    /// Reports `done` of `total` units.  The first and the last report are sent, and one every 50 ms between them.
    pub fn report(&self, done: u64, total: u64) {
        let now = Instant::now();
        if done < total && self.last.get().is_some_and(|last| now.duration_since(last) < PROGRESS_INTERVAL) {
            return;
        }
        self.last.set(Some(now));
        self.told.send_replace(Some(api::Progress { done, total }));
    }
}

/// Operation on the engine.
pub trait Operation: Send + 'static {
    /// Result of the operation.
    type Reply: Serialize + DeserializeOwned + Send + 'static;

    /// Returns its HTTP request.
    fn route(&self) -> HttpRoute;

    /// Runs it on the engine.
    fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> impl Future<Output = Result<Self::Reply>>;
}

/// Path of an image.
pub fn image_path(spec: &ImageSpec) -> String {
    format!("/v1/images/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
}

/// Appends the name of a snapshot to the path of an image, as a query.
pub fn with_snapshot(path: String, source: &SourceSpec) -> String {
    match &source.snapshot {
        Some(snapshot) => format!("{path}?snapshot={}", uri_encode(snapshot, false)),
        None => path,
    }
}

/// Returns the state of the daemon.
pub struct GetStatus;

impl Operation for GetStatus {
    type Reply = api::DaemonStatus;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/status")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::DaemonStatus> {
        engine.status().await
    }
}

/// Lists the images of a pool.
pub struct ListImages {
    /// Pool name.
    pub pool: String,
}

impl Operation for ListImages {
    type Reply = Vec<api::ImageSummary>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", format!("/v1/images/{}", uri_encode(&self.pool, false)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_images(&self.pool).await
    }
}

/// Lists the names of the pools.
pub struct ListPools;

impl Operation for ListPools {
    type Reply = Vec<String>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/names")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.pool_names())
    }
}

/// Lists the names of a pool's images, which is cheaper than listing the images.
pub struct ListNames {
    /// Pool name.
    pub pool: String,
    /// Prefix that the names must have.
    pub prefix: String,
}

impl Operation for ListNames {
    type Reply = Vec<String>;

    fn route(&self) -> HttpRoute {
        let (pool, prefix) = (uri_encode(&self.pool, false), uri_encode(&self.prefix, false));
        HttpRoute::new("GET", format!("/v1/names/{pool}?prefix={prefix}"))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        let mut names = engine.image_names(&self.pool).await?;
        names.retain(|name| name.starts_with(&self.prefix));
        Ok(names)
    }
}

/// Lists the images of a pool with their snapshots and more properties.
pub struct ListImagesLong {
    /// Pool name.
    pub pool: String,
}

impl Operation for ListImagesLong {
    type Reply = Vec<api::ImageListing>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", format!("/v1/listings/{}", uri_encode(&self.pool, false)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_images_long(&self.pool).await
    }
}

/// Returns the watchers and exports of an image.
pub struct GetImageStatus(pub ImageSpec);

impl Operation for GetImageStatus {
    type Reply = api::ImageStatus;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", image_path(&self.0) + "/status")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.image_status(&self.0).await
    }
}

/// Creates an image.
pub struct CreateImage(pub api::CreateImageRequest);

impl Operation for CreateImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/images").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::ImageInfo> {
        engine.create_image(self.0).await
    }
}

/// Returns the size and layout of an image or snapshot.
pub struct GetImage(pub SourceSpec);

impl Operation for GetImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", with_snapshot(image_path(&self.0.image), &self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::ImageInfo> {
        engine.source_info(&self.0).await
    }
}

/// Copies an image or snapshot to a new image.
pub struct CopyImage {
    /// Image or snapshot to copy.
    pub source: SourceSpec,
    /// Requested copy.
    pub request: api::CopyImageRequest,
}

impl Operation for CopyImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        let path = image_path(&self.source.image) + "/copy";
        HttpRoute::new("POST", with_snapshot(path, &self.source)).json(&self.request)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<api::ImageInfo> {
        engine.copy_image(&self.source, self.request, progress).await
    }
}

/// Resizes or renames an image.
pub struct UpdateImage {
    /// Image to change.
    pub spec: ImageSpec,
    /// Requested changes.
    pub update: api::UpdateImageRequest,
}

impl Operation for UpdateImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("PATCH", image_path(&self.spec)).json(&self.update)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<api::ImageInfo> {
        engine.update_image(&self.spec, self.update, progress).await
    }
}

/// Removes an image.
pub struct RemoveImage(pub ImageSpec);

impl Operation for RemoveImage {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", image_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.remove_image(&self.0, progress).await
    }
}

/// Returns the disk usage of an image, or of each image of a pool.
pub struct GetUsage {
    /// Pool name.
    pub pool: String,
    /// Image name; `None` for all images of the pool.
    pub image: Option<String>,
    /// Snapshot of the image at which the list ends; `None` for the image and all its snapshots.
    pub snapshot: Option<String>,
    /// Set to count bytes, of images without snapshots, even where `rbd` counts objects.
    pub exact: bool,
}

impl Operation for GetUsage {
    type Reply = api::DiskUsage;

    fn route(&self) -> HttpRoute {
        let mut target = format!("/v1/usage/{}", uri_encode(&self.pool, false));
        if let Some(image) = &self.image {
            target.push('/');
            target.push_str(&uri_encode(image, false));
        }
        let snapshot = self.snapshot.as_ref().map(|snapshot| format!("snapshot={}", uri_encode(snapshot, false)));
        let query: Vec<_> = snapshot.into_iter().chain(self.exact.then(|| "exact=true".into())).collect();
        if !query.is_empty() {
            target.push('?');
            target.push_str(&query.join("&"));
        }
        HttpRoute::new("GET", target)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<api::DiskUsage> {
        match self.image {
            Some(image) => {
                let source = source_spec(&self.pool, &image, self.snapshot.as_deref())?;
                engine.disk_usage(&source, self.exact, progress).await
            }
            None => engine.pool_usage(&self.pool, self.exact, progress).await,
        }
    }
}

/// Lists the exports.
pub struct ListTargets;

impl Operation for ListTargets {
    type Reply = Vec<api::ImageExport>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/targets")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.list_targets())
    }
}

/// Creates an export.
pub struct AttachImage(pub api::AttachRequest);

impl Operation for AttachImage {
    type Reply = api::ImageExport;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/targets").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::ImageExport> {
        engine.attach(self.0).await
    }
}

/// Ends an export.
pub struct DetachImage {
    /// Exported image.
    pub spec: ImageSpec,
    /// Front of the export.
    pub front: api::Front,
    /// Set to disconnect the hosts that have it open.
    pub force: bool,
    /// Set to keep the write log as it is.
    pub keep_log: bool,
}

impl Operation for DetachImage {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        let (pool, image) = (uri_encode(&self.spec.pool, false), uri_encode(&self.spec.image, false));
        let how = format!("force={}&keep_log={}", self.force, self.keep_log);
        HttpRoute::new("DELETE", format!("/v1/targets/{}/{pool}/{image}?{how}", self.front.name()))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.detach(&self.spec, self.front, self.force, self.keep_log).await
    }
}

/// Lists the ANA states of NVMe namespaces.
pub struct ListAna;

impl Operation for ListAna {
    type Reply = Vec<api::Ana>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/ana")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.ana())
    }
}

/// Sets ANA states of NVMe namespaces.
pub struct SetAna(pub api::SetAnaRequest);

impl Operation for SetAna {
    type Reply = Vec<api::Ana>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/ana").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.set_ana(&self.0).await
    }
}

/// Lists the NVMe subsystems of the daemon.
pub struct ListNvmeSubsystems;

impl Operation for ListNvmeSubsystems {
    type Reply = Vec<api::NvmeSubsystem>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/nvme-subsystems")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.list_nvme_subsystems())
    }
}

/// Creates an NVMe subsystem.
pub struct CreateNvmeSubsystem(pub api::CreateNvmeSubsystemRequest);

impl Operation for CreateNvmeSubsystem {
    type Reply = api::NvmeSubsystem;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/nvme-subsystems").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.create_nvme_subsystem(self.0).await
    }
}

/// Path of an NVMe subsystem or an iSCSI target; `default` is the default one.
fn access_path(kind: &str, name: Option<&str>) -> String {
    format!("/v1/{kind}/{}", uri_encode(name.unwrap_or("default"), false))
}

/// Removes an NVMe subsystem.
pub struct RemoveNvmeSubsystem(pub String);

impl Operation for RemoveNvmeSubsystem {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", access_path("nvme-subsystems", Some(&self.0)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_nvme_subsystem(&self.0).await
    }
}

/// Allows a host to connect to a subsystem; without an NQN, to the default one.
pub struct AllowNvmeHost {
    /// NQN of the subsystem; `None` for the default one.
    pub subsystem: Option<String>,
    /// Host with its credentials.
    pub host: api::NvmeHost,
}

impl Operation for AllowNvmeHost {
    type Reply = api::NvmeSubsystem;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", access_path("nvme-subsystems", self.subsystem.as_deref()) + "/hosts").json(&self.host)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.allow_nvme_host(self.subsystem.as_deref(), self.host).await
    }
}

/// Revokes a host's access to a subsystem.
pub struct DenyNvmeHost {
    /// NQN of the subsystem; `None` for the default one.
    pub subsystem: Option<String>,
    /// The host's name.
    pub host: String,
}

impl Operation for DenyNvmeHost {
    type Reply = api::NvmeSubsystem;

    fn route(&self) -> HttpRoute {
        let path = access_path("nvme-subsystems", self.subsystem.as_deref());
        HttpRoute::new("DELETE", format!("{path}/hosts/{}", uri_encode(&self.host, false)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.deny_nvme_host(self.subsystem.as_deref(), &self.host).await
    }
}

/// Lists the iSCSI targets of the daemon.
pub struct ListIscsiTargets;

impl Operation for ListIscsiTargets {
    type Reply = Vec<api::IscsiTarget>;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/iscsi-targets")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.list_iscsi_targets())
    }
}

/// Creates an iSCSI target.
pub struct CreateIscsiTarget(pub api::CreateIscsiTargetRequest);

impl Operation for CreateIscsiTarget {
    type Reply = api::IscsiTarget;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/iscsi-targets").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.create_iscsi_target(self.0).await
    }
}

/// Removes an iSCSI target.
pub struct RemoveIscsiTarget(pub String);

impl Operation for RemoveIscsiTarget {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", access_path("iscsi-targets", Some(&self.0)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.remove_iscsi_target(&self.0).await
    }
}

/// Allows or revokes an initiator's login to a target; without a name, to the default one.
pub struct AdmitInitiator {
    /// Name of the target; `None` for the default one.
    pub target: Option<String>,
    /// The initiator's name.
    pub initiator: String,
    /// Set to allow the login, unset to revoke it.
    pub allowed: bool,
}

impl Operation for AdmitInitiator {
    type Reply = api::IscsiTarget;

    fn route(&self) -> HttpRoute {
        let path = access_path("iscsi-targets", self.target.as_deref());
        let method = if self.allowed { "PUT" } else { "DELETE" };
        HttpRoute::new(method, format!("{path}/initiators/{}", uri_encode(&self.initiator, false)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        match self.allowed {
            true => engine.allow_initiator(self.target.as_deref(), &self.initiator).await,
            false => engine.deny_initiator(self.target.as_deref(), &self.initiator).await,
        }
    }
}

/// Reloads hosts and secrets.
pub struct Reload;

impl Operation for Reload {
    type Reply = api::Reloaded;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("POST", "/v1/reload")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.reload().await
    }
}

/// Returns the persistent reservations of an image.
pub struct GetReservations(pub ImageSpec);

impl Operation for GetReservations {
    type Reply = api::ReservationsInfo;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", reservations_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.reservations(&self.0).await
    }
}

/// Clears the persistent reservations of an image.
pub struct ClearReservations(pub ImageSpec);

impl Operation for ClearReservations {
    type Reply = ();

    fn route(&self) -> HttpRoute {
        HttpRoute::new("DELETE", reservations_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.clear_reservations(&self.0).await
    }
}

fn reservations_path(spec: &ImageSpec) -> String {
    format!("/v1/reservations/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
}

/// Returns the space of the embedded store.
pub struct GetStoreSpace;

impl Operation for GetStoreSpace {
    type Reply = api::StoreSpace;

    fn route(&self) -> HttpRoute {
        HttpRoute::new("GET", "/v1/store")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::StoreSpace> {
        engine.store_space().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_report_are_told_and_few_between() {
        let (sink, mut told) = ProgressSink::channel();
        let mut seen = Vec::new();
        for done in 0..=100_000 {
            sink.report(done, 100_000);
            if told.has_changed().expect("the sink is there") {
                seen.push(told.borrow_and_update().expect("a report").done);
            }
        }
        assert_eq!((seen.first(), seen.last()), (Some(&0), Some(&100_000)));
        assert!(seen.len() < 10_000, "{} of 100,001 reports were told", seen.len());
    }
}
