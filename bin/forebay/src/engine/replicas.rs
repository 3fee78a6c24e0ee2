//! Replicas of write logs: copies of other daemons' logs here, the peers that hold copies of ours, and takeovers.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{ErrorKind, LocalFuture};
use forebay_messenger::Connection;
use forebay_reactor::{now, wall_clock};
use forebay_writelog::replication::{
    KnownPeers, LogMembers, MemberState, PeerId, PrimarySet, ReplicaHost, ReplicaShelf, RequestGroups,
};
use forebay_writelog::{LogId, PeerAccess, RecordedLog, Shelf, id_text, parse_id};

use super::Engine;
use super::log_keeper::{LogDevices, load_record};
use super::logs::log_failure;
use super::volumes::VolumeOpening;
use crate::api;
use crate::config::ReplicaSettings;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;
use crate::units::Size;

/// Other daemons, on behalf of logs with replicas.
pub struct LogPeers {
    known: Rc<KnownPeers>,
    replicas: Rc<ReplicaHost>,
}

impl PeerAccess for LogPeers {
    fn own(&self) -> PeerId {
        self.known.own()
    }

    fn connection(&self, peer: PeerId) -> Option<Connection> {
        self.known.connection(peer)
    }

    fn groups(&self) -> Option<Rc<RequestGroups>> {
        Some(self.known.groups())
    }

    fn find_copy(&self, log: LogId) -> Option<Rc<Shelf>> {
        self.replicas.shelf_of(&log)
    }

    fn release_copy(&self, log: LogId) -> LocalFuture<forebay_block::Result<Option<Rc<Shelf>>>> {
        let replicas = self.replicas.clone();
        Box::pin(async move { Ok(replicas.give_up(&log).await) })
    }

    fn promise_over(&self, log: LogId, lease: Duration) -> LocalFuture<()> {
        let replicas = self.replicas.clone();
        Box::pin(async move { replicas.promise_over(&log, lease).await })
    }

    fn resume_copy(&self, log: LogId) {
        self.replicas.resume(&log);
    }
}

/// Opens the log device for copies of other daemons' logs.  If that fails, the daemon holds no copies, and serves its own
/// images.
pub async fn open_device(devices: &LogDevices, settings: Option<&ReplicaSettings>) -> Vec<ReplicaShelf> {
    let Some(settings) = settings else { return Vec::new() };
    let ReplicaSettings { path, quota, .. } = settings;
    match devices.open_for_copies(settings).await {
        Ok(shelf) => {
            tracing::info!(path = shelf.path(), quota = %Size(*quota), copies = shelf.ids().len(), "ready for replicas");
            vec![ReplicaShelf { shelf, quota: *quota }]
        }
        Err(error) => {
            tracing::error!(
                path = %path.display(), %error,
                "cannot open the log device for replicas: this daemon holds no copies until it is started again; logs of \
                 other daemons that have copies here lose this replica"
            );
            Vec::new()
        }
    }
}

/// Explains an error of opening a log that has members.
pub fn members_failure(error: forebay_block::Error, spec: &ImageSpec) -> Failure {
    let kind = error.kind();
    let failure = Failure::from(error).context(format!("the write log of {spec}"));
    match kind {
        ErrorKind::Busy => failure.hint(format!(
            "the image is served there; if that daemon is lost, take it over here: forebay log takeover {spec}"
        )),
        ErrorKind::Unsupported => failure.hint("start this machine's daemon, and run the command through it"),
        ErrorKind::Denied => failure.hint(
            "a takeover puts the former primary on the cluster's blocklist, for which the key needs mon 'profile rbd'; \
             'forebay log info' lists the members that have every acknowledged write",
        ),
        ErrorKind::Fenced => failure.hint(
            "the cluster has fenced this daemon's client, or another daemon has taken the log over: 'forebay log info' \
             names the primary",
        ),
        _ => failure,
    }
}

/// Explains that this daemon's copy of a log in memory has ended with a former process.
fn ended_copy_failure(error: forebay_block::Error, spec: &ImageSpec, others: &[String]) -> Failure {
    let failure = Failure::from(error).context(format!("the write log of {spec}"));
    failure.hint(match others {
        [] => format!(
            "nobody has what was not written back; the image is used without it, as it was before: forebay log discard \
             {spec} --force"
        ),
        others => {
            format!("nothing is lost if it is taken over at {}: forebay log takeover {spec}", others.join(" or "))
        }
    })
}

/// Takeover of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TakeoverRequest {
    /// Set to write the log back, and close it again.
    pub flush_only: bool,
    /// Set to take over from a primary that is alive, which is fenced.
    pub force: bool,
    /// Log and term of a silent primary that it was decided about; `None` for a takeover by command.
    pub silent: Option<(LogId, u64)>,
}

/// Takeovers of this daemon.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TakeoverCounts {
    /// Number of logs that were taken over.
    pub taken_over: u64,
    /// Time of the last one, from the command until the log served requests, in nanoseconds.
    pub last_ns: u64,
}

impl Engine {
    /// Returns the access of logs to other daemons, where this process is one.
    pub(super) fn log_peers(&self) -> Option<Rc<LogPeers>> {
        self.options.daemon.as_ref()?;
        Some(Rc::new(LogPeers { known: self.peers.known().clone(), replicas: self.peers.replicas().clone() }))
    }

    /// Resolves the peers that are to have copies of a log: names become ids, a number becomes that many peers.
    /// `before` are those that the log has already.
    pub(super) async fn resolve_replicas(
        &self,
        request: &mut api::AttachRequest,
        before: Option<&[String]>,
    ) -> Result<()> {
        let wanted = request.replicas.take();
        if let Some(why) = request.log.as_ref().and_then(api::LogPlace::refusal) {
            return Err(Failure::invalid(format!("a write log cannot be there: {why}")));
        }
        let Some(place) = &mut request.log else {
            return match wanted {
                Some(_) => Err(Failure::invalid("replicas are of a write log: name it with --log MEDIUM[:PATH]:SIZE")),
                None => Ok(()),
            };
        };
        match (wanted, &place.replicas) {
            (Some(_), Some(names)) if !names.is_empty() => {
                return Err(Failure::invalid(
                    "the peers are either named with --replica, or their number is: --replicas",
                ));
            }
            (Some(count), _) => {
                self.peers.refresh().await;
                place.replicas = Some(self.choose_replicas(place, count, before)?);
            }
            (None, None) => {}
            (None, Some(names)) => {
                let mut ids = Vec::with_capacity(names.len());
                for name in names.iter() {
                    ids.push(self.replica_id(name).await?);
                }
                ids.iter().zip(names).try_for_each(|(id, name)| self.require_medium(id, name, place))?;
                place.replicas = Some(ids);
            }
        }
        let keeps_some = place.replicas.is_none() && before.is_some_and(|before| !before.is_empty());
        if place.is_in_memory() && place.replicas.as_ref().is_none_or(Vec::is_empty) && !keeps_some {
            return Err(Failure::invalid("a write log in memory ends with this daemon: it needs a replica").hint(
                "name the peers that hold copies: --replica PEER, or --replicas N; or take the medium ssd or pmem",
            ));
        }
        let too_many = |count: u32, replicas: usize| {
            let what =
                format!("min-replicas={count}, and {replicas} replicas are wished: no write would be acknowledged");
            Failure::invalid(what).hint("name more peers: --replica PEER, or --replicas N")
        };
        let Some(ids) = &mut place.replicas else {
            let has = before.map_or(0, <[String]>::len);
            if let Some(count) = place.replicas_min.filter(|count| has > 0 && *count as usize > has) {
                return Err(too_many(count, has));
            }
            let is_plain = (place.takeover, place.replicas_min, place.lease_ms) == (None, None, None);
            return match is_plain || before.is_some_and(|before| !before.is_empty()) {
                true => Ok(()),
                false => Err(Failure::invalid("takeover=, min-replicas= and lease= are of a log with replicas")
                    .hint("name the peers that hold copies: --replica PEER, or --replicas N")),
            };
        };
        // Their order is that in which they take over.
        let mut seen = BTreeSet::new();
        ids.retain(|id| seen.insert(id.clone()));
        if let Some(count) = place.replicas_min.filter(|count| *count as usize > ids.len()) {
            return Err(too_many(count, ids.len()));
        }
        if !ids.is_empty() && !self.is_in_ceph(&request.pool) {
            let what =
                format!("the pool '{}' is this daemon's own: no other one could take its logs over", request.pool);
            return Err(Failure::new(FailureKind::Unsupported, what)
                .hint("leave out --replica, or use an image in a pool of the Ceph cluster"));
        }
        Ok(())
    }

    /// Returns the id of the peer with a name.  An id is taken as it is, since its peer may be away.
    async fn replica_id(&self, name: &str) -> Result<String> {
        if parse_id(name).is_some() {
            return Ok(name.to_owned());
        }
        match self.peers.find(name).await {
            Ok(peer) => Ok(peer.to_string()),
            Err(error) => Err(Failure::new(FailureKind::NotFound, error.to_string())
                .hint("'forebay status' lists the peers: name one by host name, address or id")),
        }
    }

    /// Refuses a peer that offers no medium that may have a copy of a log.  One that is away may offer any.
    fn require_medium(&self, id: &str, name: &str, place: &api::LogPlace) -> Result<()> {
        let peers = self.peers.known().list();
        let Some(peer) = peers.iter().find(|peer| peer.hello.peer.to_string() == id) else { return Ok(()) };
        let offered: Vec<api::LogMedium> = peer.hello.offers.iter().map(|offer| offer.medium.into()).collect();
        if offered.is_empty() || offered.iter().any(|medium| medium.takes_copies_of(place.medium)) {
            return Ok(());
        }
        let offered: Vec<&str> = offered.into_iter().map(api::LogMedium::name).collect();
        let (offered, medium) = (offered.join(" and "), place.medium.name());
        let what = format!("the peer {name} offers {offered}, which can have no copy of a log on {medium}");
        Err(Failure::new(FailureKind::Unsupported, what).hint(match place.is_in_memory() {
            true => {
                "copies of logs in memory are in memory or persistent memory: [replicas] medium there is dram or pmem"
            }
            false => "copies in memory are of logs in memory only, and those on an ssd of logs on an ssd",
        }))
    }

    /// Chooses peers that have room for a log: those that have a copy already, then the nearest ones.
    fn choose_replicas(&self, place: &api::LogPlace, count: u32, before: Option<&[String]>) -> Result<Vec<String>> {
        let place_before = |id: &String| before.and_then(|before| before.iter().position(|had| had == id));
        let mut found: Vec<(usize, u64, String)> = Vec::new();
        for peer in self.peers.known().list() {
            let id = peer.hello.peer.to_string();
            let fits = |offer: &&forebay_writelog::replication::hello::ReplicaOffer| {
                api::LogMedium::from(offer.medium).takes_copies_of(place.medium) && offer.free >= place.size
            };
            let had = place_before(&id);
            if had.is_some() || peer.hello.offers.iter().any(|offer| fits(&offer)) {
                let round_trip = peer.round_trip.map_or(u64::MAX, |time| time.as_micros() as u64);
                found.push((had.unwrap_or(usize::MAX), round_trip, id));
            }
        }
        found.sort_unstable();
        if found.len() < count as usize {
            let what = format!(
                "{} of the connected peers have room for a copy of {} of a log on {}; {count} are wanted",
                found.len(),
                Size(place.size),
                place.medium.name()
            );
            return Err(Failure::new(FailureKind::NoSpace, what)
                .hint("'forebay status' shows what each peer offers; its [replicas] section sets that"));
        }
        Ok(found.into_iter().take(count as usize).map(|(_, _, id)| id).collect())
    }

    /// Takes over the log of an image whose primary is gone, or is to be fenced: this daemon serves the image then.
    pub async fn take_over_log(&self, spec: &ImageSpec, request: TakeoverRequest) -> Result<api::WriteLogInfo> {
        let begin = now();
        let TakeoverRequest { flush_only, force, silent } = request;
        self.refuse_group_volume(spec, "taken over by its owner there, which the group assigns")?;
        let _export = self.exports.turn(spec).await;
        {
            let _turn = self.volumes.opening.lock(spec).await;
            let (log, members) = self.members_of(spec).await?;
            let own = self.peers.known().own();
            if members.primary() != own {
                if silent.is_some_and(|(log, _)| !self.may_take_over(&log)) {
                    let what = format!("the primary of the write log of {spec} is heard of again");
                    return Err(Failure::new(FailureKind::Busy, what));
                }
                if silent.is_some_and(|(_, term)| term != members.term()) {
                    let primary = members.primary();
                    let what = format!("peer {primary} has taken the write log of {spec} over meanwhile");
                    return Err(Failure::new(FailureKind::Busy, what));
                }
                self.refuse_takeover(spec, &log, &members, force)?;
                if self.volumes.is_open(spec) {
                    return Err(Failure::new(
                        FailureKind::Busy,
                        format!("the image {spec} is open here, without this log"),
                    )
                    .hint(format!("end its exports first: forebay detach {spec} --keep-log")));
                }
                let volume = self.open_as(spec, VolumeOpening::TakeOver(members.term())).await?;
                self.log_acquired(spec, &volume).await?;
                let took = begin.elapsed();
                let mut counts = self.takeovers.get();
                counts.taken_over += 1;
                counts.last_ns = took.as_nanos() as u64;
                self.takeovers.set(counts);
                let former = members.primary();
                let automatic = silent.is_some();
                tracing::warn!(
                    image = %spec, former_primary = %former, term = members.term(), automatic,
                    ms = took.as_millis() as u64, "took a write log over; this daemon serves it"
                );
                if let Some(log) = volume.attachment.recorded() {
                    let takeover = api::LogTakeover {
                        at_ms: wall_clock().as_millis() as u64,
                        duration_ms: took.as_millis() as u64,
                        from: former.to_string(),
                        from_host: self.peers.known().host(former),
                        automatic,
                    };
                    self.last_takeovers.borrow_mut().insert(id_text(&log.id), takeover);
                }
            }
        }
        let volume = self.open_volume(spec).await?;
        if flush_only {
            let log = volume.log().ok_or_else(|| Failure::failed("the write log is gone again"))?;
            log.drain().await.map_err(|error| log_failure(error, spec))?;
            drop((log, volume));
            if !self.is_exported(spec) {
                self.end_log(spec, true).await?;
            }
        }
        self.log_info(spec).await
    }

    /// Returns an image's log, as its record has it, and its members.
    pub(super) async fn members_of(&self, spec: &ImageSpec) -> Result<(RecordedLog<api::LogPlace>, LogMembers)> {
        let image = self.open_image(spec).await?;
        let record = load_record(&image).await.map_err(|error| log_failure(error, spec))?;
        match record.log {
            Some(log) => match log.members.clone() {
                Some(members) => Ok((log, members)),
                None => Err(Failure::new(
                    FailureKind::Unsupported,
                    format!("the write log of {spec} at {} has no replicas", log.place),
                )
                .hint("only the machine with its log device can serve it")),
            },
            None => Err(Failure::new(FailureKind::NotFound, format!("{spec} has no write log"))
                .hint(format!("serve it right away: forebay attach {spec}"))),
        }
    }

    /// Refuses a takeover that cannot succeed, or that would fence a primary that is alive.
    fn refuse_takeover(
        &self,
        spec: &ImageSpec,
        log: &RecordedLog<api::LogPlace>,
        members: &LogMembers,
        force: bool,
    ) -> Result<()> {
        let (own, primary) = (self.peers.known().own(), members.primary());
        match members.state(own) {
            Some(MemberState::Complete) => {}
            Some(MemberState::Filling) => {
                return Err(Failure::new(
                    FailureKind::Denied,
                    format!("this daemon's copy of the write log of {spec} is still being filled: it lacks acknowledged writes"),
                )
                .hint("take it over at another member ('forebay log info' lists them), or bring its primary back"));
            }
            None => {
                return Err(Failure::new(
                    FailureKind::Denied,
                    format!("this daemon is no member of the write log of {spec}"),
                )
                .hint("take it over at a member: 'forebay log info' lists them"));
            }
        }
        let is_closed = members.client().is_empty();
        // A primary that was started again has no copy in memory any more, and heartbeats for none.
        let is_restarted =
            log.place.is_in_memory() && self.peers.replicas().is_silent(&log.id, log.place.policy().lease);
        if !force && !is_closed && !is_restarted && self.peers.known().connection(primary).is_some() {
            let host = self.peers.known().host(primary).unwrap_or_else(|| primary.to_string());
            let what = format!("the primary of the write log of {spec}, {host}, is alive and connected");
            return Err(Failure::new(FailureKind::Busy, what).hint(format!(
                "hand it over there: forebay detach {spec} --keep-log; --force fences that daemon, and with it all images \
                 that it serves from this cluster"
            )));
        }
        Ok(())
    }

    /// Explains an error of opening a log with these members.
    pub(super) fn opening_failure(
        &self,
        error: forebay_block::Error,
        spec: &ImageSpec,
        log: &RecordedLog<api::LogPlace>,
    ) -> Failure {
        let Some(members) = &log.members else { return log_failure(error, spec) };
        let own = self.peers.known().own();
        if error.kind() != ErrorKind::NotFound || !log.place.is_in_memory() || members.primary() != own {
            return members_failure(error, spec);
        }
        let host = |peer: PeerId| self.peers.known().host(peer).unwrap_or_else(|| peer.to_string());
        let others: Vec<String> = members.complete().filter(|peer| *peer != own).map(host).collect();
        ended_copy_failure(error, spec, &others)
    }

    /// Returns the members of the log of an open volume, where it has some.
    pub(super) fn members(&self, spec: &ImageSpec) -> Option<Rc<PrimarySet>> {
        self.volumes.find(spec)?.attachment.members()
    }

    /// Returns a member of a log for display.
    pub(super) fn describe_member(&self, peer: PeerId, is_primary: bool, state: MemberState) -> api::LogMember {
        api::LogMember {
            peer: peer.to_string(),
            host: self.peers.known().host(peer),
            role: if is_primary { "primary".into() } else { "replica".into() },
            state: match state {
                MemberState::Complete => "complete".into(),
                MemberState::Filling => "filling".into(),
            },
            connected: None,
            lag_entries: 0,
            lag_bytes: 0,
            lag_ms: 0,
        }
    }
}
