//! Each thing that can be asked of the engine, once: how it travels over HTTP, and what does it.
//!
//! The command line sends an operation to the daemon or runs it on an engine of its own; the daemon's HTTP handlers
//! build the same operations from requests.  So both ways do the same.

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
use crate::spec::{ImageSpec, uri_encode};

/// A request over HTTP.
pub struct Route {
    /// `GET` and so on.
    pub method: &'static str,
    /// Path and query.
    pub target: String,
    /// A JSON body.
    pub body: Option<String>,
}

impl Route {
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

/// Tells how far an operation has come; only the newest state is kept for whoever looks.
#[derive(Clone)]
pub struct ProgressSink {
    told: watch::Sender<Option<api::Progress>>,
    last: Cell<Option<Instant>>,
}

impl ProgressSink {
    /// A sink, and where to look.
    pub fn channel() -> (Self, watch::Receiver<Option<api::Progress>>) {
        let (told, receiver) = watch::channel(None);
        (Self { told, last: Cell::new(None) }, receiver)
    }

    /// Reports that so much is done of so much.  The first and the last report are told, and one every 50 ms between them.
    pub fn report(&self, done: u64, total: u64) {
        let now = Instant::now();
        if done < total && self.last.get().is_some_and(|last| now.duration_since(last) < PROGRESS_INTERVAL) {
            return;
        }
        self.last.set(Some(now));
        self.told.send_replace(Some(api::Progress { done, total }));
    }
}

/// Something that can be asked of the engine.
pub trait Operation: Send + 'static {
    /// What comes back.
    type Reply: Serialize + DeserializeOwned + Send + 'static;

    /// How it is asked over HTTP.
    fn route(&self) -> Route;

    /// Does it.
    fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> impl Future<Output = Result<Self::Reply>>;
}

/// Path of an image.
pub fn image_path(spec: &ImageSpec) -> String {
    format!("/v1/images/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
}

/// What the daemon is and does.
pub struct GetStatus;

impl Operation for GetStatus {
    type Reply = api::Status;

    fn route(&self) -> Route {
        Route::new("GET", "/v1/status")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::Status> {
        engine.status().await
    }
}

/// The images of a pool.
pub struct ListImages {
    /// The pool.
    pub pool: String,
}

impl Operation for ListImages {
    type Reply = Vec<api::ImageSummary>;

    fn route(&self) -> Route {
        Route::new("GET", format!("/v1/images/{}", uri_encode(&self.pool, false)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_images(&self.pool).await
    }
}

/// Names of the pools.
pub struct ListPools;

impl Operation for ListPools {
    type Reply = Vec<String>;

    fn route(&self) -> Route {
        Route::new("GET", "/v1/names")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.pool_names())
    }
}

/// Names of a pool's images, which takes less than what they are.
pub struct ListNames {
    /// The pool.
    pub pool: String,
    /// What they begin with.
    pub prefix: String,
}

impl Operation for ListNames {
    type Reply = Vec<String>;

    fn route(&self) -> Route {
        let (pool, prefix) = (uri_encode(&self.pool, false), uri_encode(&self.prefix, false));
        Route::new("GET", format!("/v1/names/{pool}?prefix={prefix}"))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        let mut names = engine.image_names(&self.pool).await?;
        names.retain(|name| name.starts_with(&self.prefix));
        Ok(names)
    }
}

/// The images of a pool with their snapshots, and more of each.
pub struct ListImagesLong {
    /// The pool.
    pub pool: String,
}

impl Operation for ListImagesLong {
    type Reply = Vec<api::ImageListing>;

    fn route(&self) -> Route {
        Route::new("GET", format!("/v1/listings/{}", uri_encode(&self.pool, false)))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_images_long(&self.pool).await
    }
}

/// Watchers and exports of an image.
pub struct GetImageStatus(pub ImageSpec);

impl Operation for GetImageStatus {
    type Reply = api::ImageStatus;

    fn route(&self) -> Route {
        Route::new("GET", image_path(&self.0) + "/status")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.image_status(&self.0).await
    }
}

/// A new image.
pub struct CreateImage(pub api::CreateImage);

impl Operation for CreateImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> Route {
        Route::new("POST", "/v1/images").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::ImageInfo> {
        engine.create_image(self.0).await
    }
}

/// An image's size and layout.
pub struct GetImage(pub ImageSpec);

impl Operation for GetImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> Route {
        Route::new("GET", image_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::ImageInfo> {
        engine.image_info(&self.0).await
    }
}

/// Another size or name.
pub struct UpdateImage {
    /// Which.
    pub spec: ImageSpec,
    /// What changes.
    pub update: api::UpdateImage,
}

impl Operation for UpdateImage {
    type Reply = api::ImageInfo;

    fn route(&self) -> Route {
        Route::new("PATCH", image_path(&self.spec)).json(&self.update)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<api::ImageInfo> {
        engine.update_image(&self.spec, self.update, progress).await
    }
}

/// An image goes.
pub struct RemoveImage(pub ImageSpec);

impl Operation for RemoveImage {
    type Reply = ();

    fn route(&self) -> Route {
        Route::new("DELETE", image_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<()> {
        engine.remove_image(&self.0, progress).await
    }
}

/// What an image, or each image of a pool, takes up.
pub struct GetUsage {
    /// The pool.
    pub pool: String,
    /// Only this image.
    pub image: Option<String>,
    /// Count bytes, of images alone, also where `rbd` counts objects.
    pub exact: bool,
}

impl Operation for GetUsage {
    type Reply = api::DiskUsage;

    fn route(&self) -> Route {
        let mut target = format!("/v1/usage/{}", uri_encode(&self.pool, false));
        if let Some(image) = &self.image {
            target.push('/');
            target.push_str(&uri_encode(image, false));
        }
        if self.exact {
            target.push_str("?exact=true");
        }
        Route::new("GET", target)
    }

    async fn run(self, engine: Rc<Engine>, progress: ProgressSink) -> Result<api::DiskUsage> {
        engine.disk_usage(&self.pool, self.image.as_deref(), self.exact, progress).await
    }
}

/// What is exported.
pub struct ListTargets;

impl Operation for ListTargets {
    type Reply = Vec<api::Target>;

    fn route(&self) -> Route {
        Route::new("GET", "/v1/targets")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.list_targets())
    }
}

/// A new export.
pub struct Attach(pub api::Attach);

impl Operation for Attach {
    type Reply = api::Target;

    fn route(&self) -> Route {
        Route::new("POST", "/v1/targets").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<api::Target> {
        engine.attach(self.0).await
    }
}

/// An export ends.
pub struct Detach {
    /// Which image's.
    pub spec: ImageSpec,
    /// How it is exported.
    pub front: api::Front,
    /// Disconnect the hosts that have it open.
    pub force: bool,
    /// Leave the write log as it is.
    pub keep_log: bool,
}

impl Operation for Detach {
    type Reply = ();

    fn route(&self) -> Route {
        let (pool, image) = (uri_encode(&self.spec.pool, false), uri_encode(&self.spec.image, false));
        let how = format!("force={}&keep_log={}", self.force, self.keep_log);
        Route::new("DELETE", format!("/v1/targets/{}/{pool}/{image}?{how}", self.front.name()))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.detach(&self.spec, self.front, self.force, self.keep_log).await
    }
}

/// How NVMe namespaces are reached.
pub struct ListAna;

impl Operation for ListAna {
    type Reply = Vec<api::Ana>;

    fn route(&self) -> Route {
        Route::new("GET", "/v1/ana")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        Ok(engine.ana())
    }
}

/// Sets how NVMe namespaces are reached.
pub struct SetAna(pub api::SetAna);

impl Operation for SetAna {
    type Reply = Vec<api::Ana>;

    fn route(&self) -> Route {
        Route::new("POST", "/v1/ana").json(&self.0)
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.set_ana(&self.0).await
    }
}

/// Reads hosts and secrets again.
pub struct Reload;

impl Operation for Reload {
    type Reply = api::Reloaded;

    fn route(&self) -> Route {
        Route::new("POST", "/v1/reload")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.reload().await
    }
}

/// Who may read and write an image.
pub struct GetReservations(pub ImageSpec);

impl Operation for GetReservations {
    type Reply = api::Reservations;

    fn route(&self) -> Route {
        Route::new("GET", reservations_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.reservations(&self.0).await
    }
}

/// Everybody may read and write an image again.
pub struct ClearReservations(pub ImageSpec);

impl Operation for ClearReservations {
    type Reply = ();

    fn route(&self) -> Route {
        Route::new("DELETE", reservations_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.clear_reservations(&self.0).await
    }
}

fn reservations_path(spec: &ImageSpec) -> String {
    format!("/v1/reservations/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
}

/// The write logs.
pub struct ListLogs;

impl Operation for ListLogs {
    type Reply = Vec<api::Log>;

    fn route(&self) -> Route {
        Route::new("GET", "/v1/logs")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.list_logs().await
    }
}

/// An image's write log.
pub struct GetLog(pub ImageSpec);

impl Operation for GetLog {
    type Reply = api::Log;

    fn route(&self) -> Route {
        Route::new("GET", log_path(&self.0))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.log_info(&self.0).await
    }
}

/// Everything in an image's write log goes to the backend.
pub struct FlushLog(pub ImageSpec);

impl Operation for FlushLog {
    type Reply = api::Log;

    fn route(&self) -> Route {
        Route::new("POST", log_path(&self.0) + "/flush")
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<Self::Reply> {
        engine.flush_log(&self.0).await
    }
}

/// An image's write log is given up.
pub struct DiscardLog {
    /// Which image's.
    pub spec: ImageSpec,
    /// With what it holds.
    pub force: bool,
}

impl Operation for DiscardLog {
    type Reply = ();

    fn route(&self) -> Route {
        Route::new("DELETE", format!("{}?force={}", log_path(&self.spec), self.force))
    }

    async fn run(self, engine: Rc<Engine>, _: ProgressSink) -> Result<()> {
        engine.discard_log(&self.spec, self.force).await
    }
}

fn log_path(spec: &ImageSpec) -> String {
    format!("/v1/logs/{}/{}", uri_encode(&spec.pool, false), uri_encode(&spec.image, false))
}

/// The embedded store's space.
pub struct GetStoreSpace;

impl Operation for GetStoreSpace {
    type Reply = api::StoreSpace;

    fn route(&self) -> Route {
        Route::new("GET", "/v1/store")
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
