//! List of write logs, and descriptions of single ones.

use std::collections::{BTreeMap, BTreeSet};
use std::iter;
use std::path::PathBuf;

use forebay_image::Images;
use forebay_reactor::wall_clock;
use forebay_writelog::replication::{LogMembers, MemberReport, MemberState, PeerId, ReplicaPolicy, ReplicaShelf};
use forebay_writelog::{LogInfo, LogRecord, LogSurvey, MediumKind, Membership, RecordedLog, Shelf, WriteLog, id_text};

use super::super::Engine;
use super::super::log_keeper::{limits_of, load_record};
use super::super::volumes::Volume;
use super::{log_failure, no_log};
use crate::api;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL, image_spec, place_text};

/// Survey of logs, by the text of their ids; their groups are pools.
type Survey = LogSurvey<String, String, api::WriteLogInfo, Failure>;

impl Engine {
    /// Lists every known log: those of images, and other logs on their devices.
    ///
    /// In pools of this daemon all images are checked; in other pools those that are open, exported, or named by a
    /// log.
    pub async fn list_logs(&self) -> Result<Vec<api::WriteLogInfo>> {
        let mut specs: BTreeSet<ImageSpec> = self.volumes.open_specs().into_iter().collect();
        specs.extend(self.list_targets().iter().filter_map(|target| image_spec(&target.pool, &target.image).ok()));
        for pool in self.pools.keys() {
            specs.extend(self.images_of(pool).await?);
        }
        let mut survey = Survey::default();
        let mut places: BTreeMap<PathBuf, api::LogPlace> = BTreeMap::new();
        for spec in &specs {
            if let Some(log) = self.log_of(spec).await {
                places.entry(log.place.path.clone()).or_insert_with(|| log.place.clone());
                survey.add_named(log.id.clone(), log);
            }
        }
        for place in self.exports.log_places() {
            places.entry(place.path.clone()).or_insert(place);
        }
        for ReplicaShelf { shelf, .. } in self.peers.replicas().shelves() {
            for id in shelf.ids() {
                if let Ok(info) = shelf.inspect(&id).await {
                    let path = device_path(shelf);
                    let place = copy_place(shelf.medium().into(), path, info.size);
                    let log = api::WriteLogInfo { state: "replica".into(), ..describe(&info, place) };
                    let pool = log.image.parse::<ImageSpec>().map(|spec| spec.pool).map_err(Failure::invalid);
                    survey.add_found(log.id.clone(), log, pool);
                }
            }
        }
        for place in places.into_values() {
            let Ok(shelf) = self.logs.devices.open(&place, false).await else { continue };
            for id in shelf.ids() {
                if let Ok(info) = shelf.inspect(&id).await {
                    let log = describe(&info, api::LogPlace { size: info.size, ..place.clone() });
                    let pool = log.image.parse::<ImageSpec>().map(|spec| spec.pool).map_err(Failure::invalid);
                    survey.add_found(log.id.clone(), log, pool);
                }
            }
        }
        while let Some(pool) = survey.next_group().cloned() {
            let result = self.search_pool(&pool, &mut survey).await;
            survey.end_search(pool, result);
        }
        let logs = survey.finish().into_iter().map(|(log, membership)| match membership {
            Membership::Named => log,
            Membership::Abandoned => api::WriteLogInfo { state: "abandoned".into(), ..log },
            Membership::Unknown(failure) => {
                api::WriteLogInfo { state: "unknown".into(), reason: Some(failure.message), ..log }
            }
        });
        Ok(logs.map(|log| self.with_settings(log)).collect())
    }

    /// Returns the images of a pool, those of its namespaces included.
    pub(in crate::engine) async fn images_of(&self, pool: &str) -> Result<Vec<ImageSpec>> {
        let backend = self.pool(pool).await?;
        let namespaces = Images::of(&backend).namespaces().await.map_err(|error| self.pool_failure(error, pool))?;
        let mut found = Vec::new();
        for namespace in iter::once(String::new()).chain(namespaces) {
            let images = Images::in_namespace(&backend, &namespace).list().await;
            let place = place_text(pool, &namespace);
            for name in images.map_err(|error| self.pool_failure(error, &place))? {
                match ImageSpec::listed(&place, &name) {
                    Ok(spec) => found.push(spec),
                    // It was made by another program, and cannot be attached with a log.
                    Err(error) => tracing::debug!(pool = place, image = name, error, "an image cannot be named here"),
                }
            }
        }
        Ok(found)
    }

    /// Returns the log of an image, if it has one.  An image that cannot be read is skipped.
    async fn log_of(&self, spec: &ImageSpec) -> Option<api::WriteLogInfo> {
        let found = self.find_log(spec).await;
        found.unwrap_or_else(|failure| {
            tracing::debug!(image = %spec, error = %failure.message, "its write log cannot be determined");
            None
        })
    }

    /// Adds the logs of all images of a pool.
    async fn search_pool(&self, pool: &str, survey: &mut Survey) -> Result<()> {
        match self.images_of(pool).await {
            Ok(images) => {
                for image in images {
                    if let Some(log) = self.log_of(&image).await {
                        survey.add_named(log.id.clone(), log);
                    }
                }
                Ok(())
            }
            // Its images ended with the daemon.
            Err(_) if pool == RAM_POOL => Ok(()),
            Err(failure) if failure.kind == FailureKind::NotFound => Ok(()),
            Err(failure) => Err(failure.context(format_args!("whether an image of {pool} has this log is unknown"))),
        }
    }

    /// Returns an image's log.
    pub async fn log_info(&self, spec: &ImageSpec) -> Result<api::WriteLogInfo> {
        let found = self.find_log(spec).await?.ok_or_else(|| no_log(spec))?;
        Ok(self.with_settings(found))
    }

    pub(super) async fn find_log(&self, spec: &ImageSpec) -> Result<Option<api::WriteLogInfo>> {
        if let Some(volume) = self.volumes.find(spec)
            && let Some(log) = running(spec, &volume)
        {
            return Ok(Some(self.with_members(spec, log)));
        }
        let image = self.open_image(spec).await?;
        let record = load_record(&image).await.map_err(|error| log_failure(error, spec))?;
        let LogRecord { epoch, log: Some(recorded) } = record else { return Ok(None) };
        if let Some(members) = recorded.members.clone() {
            return Ok(Some(self.unopened_with_members(spec, recorded, &members).await));
        }
        let looked = async { self.logs.devices.open(&recorded.place, false).await?.inspect(&recorded.id).await };
        Ok(Some(match looked.await {
            Ok(info) => api::WriteLogInfo { image: spec.to_string(), ..describe(&info, recorded.place) },
            Err(error) => api::WriteLogInfo {
                id: id_text(&recorded.id),
                image: spec.to_string(),
                epoch,
                state: "unreachable".into(),
                reason: Some(error.to_string()),
                ..api::WriteLogInfo::at(recorded.place)
            },
        }))
    }

    /// Describes the log of an open volume.
    pub(in crate::engine) fn running_log(&self, spec: &ImageSpec) -> Option<api::WriteLogInfo> {
        let volume = self.volumes.find(spec)?;
        Some(self.with_settings(self.with_members(spec, running(spec, &volume)?)))
    }

    /// Adds the members of a log that is open here.
    fn with_members(&self, spec: &ImageSpec, log: api::WriteLogInfo) -> api::WriteLogInfo {
        let Some(set) = self.members(spec) else { return log };
        let (_, wanted) = set.copies();
        // Writes that wait are more urgent to know of than write-back that does.
        let reason = set.stall().filter(|_| !set.is_fenced()).or(log.reason.clone());
        let describe = |member: MemberReport| api::LogMember {
            connected: Some(member.is_connected),
            lag_entries: member.lag_entries,
            lag_bytes: member.lag_bytes,
            lag_ms: member.waits.as_millis() as u64,
            ..self.describe_member(member.peer, member.is_primary, member.state)
        };
        let members = set.report().into_iter().map(describe).collect();
        api::WriteLogInfo { members, copies_wanted: Some(wanted as u32), epoch: set.record().epoch(), reason, ..log }
    }

    /// Describes a log with members that is not open here: as found in this daemon's copy, if it has one.
    async fn unopened_with_members(
        &self,
        spec: &ImageSpec,
        recorded: RecordedLog<api::LogPlace>,
        members: &LogMembers,
    ) -> api::WriteLogInfo {
        let own = self.peers.known().own();
        let copy = self.peers.replicas().shelf_of(&recorded.id);
        let shelf = match (copy, members.primary() == own) {
            (Some(shelf), _) => Ok(shelf),
            (None, true) => self.logs.devices.open(&recorded.place, false).await,
            (None, false) => {
                let text = "its members are other daemons";
                Err(forebay_block::Error::new(forebay_block::ErrorKind::NotFound, text))
            }
        };
        let found = match shelf {
            Ok(shelf) if members.primary() != own => shelf.inspect_copy(&recorded.id).await,
            Ok(shelf) => shelf.inspect(&recorded.id).await,
            Err(error) => Err(error),
        };
        let role = |info: &LogInfo| match (members.primary() == own, info.open) {
            (true, false) => "closed",
            (true, true) => "open",
            (false, _) => "replica",
        };
        let described = match found {
            Ok(info) => api::WriteLogInfo { state: role(&info).into(), ..describe(&info, recorded.place) },
            Err(error) => api::WriteLogInfo {
                id: id_text(&recorded.id),
                state: if members.primary() == own { "unreachable".into() } else { "replica".into() },
                reason: Some(match members.primary() == own && recorded.place.is_in_memory() {
                    true => "its copy here was in memory, and ended with its process".to_owned(),
                    false => error.to_string(),
                }),
                ..api::WriteLogInfo::at(recorded.place)
            },
        };
        let primary = members.primary();
        let mut all: Vec<(bool, PeerId, MemberState)> =
            members.members().map(|(peer, entry)| (peer != primary, peer, entry.state)).collect();
        all.sort_by_key(|(is_replica, peer, _)| (*is_replica, *peer));
        let members_shown =
            all.into_iter().map(|(is_replica, peer, state)| self.describe_member(peer, !is_replica, state)).collect();
        api::WriteLogInfo { image: spec.to_string(), epoch: members.epoch(), members: members_shown, ..described }
    }

    /// Fills in the effective limits of a log, the policy of its replicas, and its last takeover by this daemon.
    fn with_settings(&self, log: api::WriteLogInfo) -> api::WriteLogInfo {
        let limits = limits_of(&log.place, self.configured_limits());
        let ReplicaPolicy { lease, automatic: _, replicas_min } = log.place.policy();
        let policy = api::LogPolicy {
            takeover: log.place.takeover.unwrap_or_default(),
            lease_ms: lease.as_millis() as u64,
            min_replicas: replicas_min,
        };
        api::WriteLogInfo {
            dirty_max: limits.bytes_max,
            dirty_age_max_ms: limits.age_max.as_millis() as u64,
            policy: (!log.members.is_empty()).then_some(policy),
            last_takeover: self.last_takeovers.borrow().get(&log.id).cloned(),
            ..log
        }
    }
}

/// Returns the path of a log device; memory has none.
fn device_path(shelf: &Shelf) -> PathBuf {
    if shelf.medium() == MediumKind::Dram { PathBuf::new() } else { shelf.path().into() }
}

/// Returns the place of a copy of another daemon's log.
fn copy_place(medium: api::LogMedium, path: PathBuf, size: u64) -> api::LogPlace {
    api::LogPlace {
        medium,
        path,
        size,
        on_flush: false,
        force: false,
        dirty_max: None,
        dirty_age_ms: None,
        takeover: None,
        replicas_min: None,
        lease_ms: None,
        replicas: None,
        group: None,
    }
}

/// Describes the log of an open volume.
fn running(spec: &ImageSpec, volume: &Volume) -> Option<api::WriteLogInfo> {
    let (log, recorded) = (volume.log()?, volume.attachment.recorded()?);
    Some(describe_running(spec, &log, recorded))
}

/// Describes a log as found on its device.
fn describe(info: &LogInfo, place: api::LogPlace) -> api::WriteLogInfo {
    api::WriteLogInfo {
        id: id_text(&info.id),
        image: info.name.clone(),
        epoch: info.epoch,
        encrypted: Some(info.encrypted),
        state: if info.open { "open".into() } else { "closed".into() },
        dirty_entries: info.dirty_entries,
        dirty_bytes: info.dirty_bytes,
        dirty_since_ms: info.dirty_since_ms,
        ..api::WriteLogInfo::at(place)
    }
}

/// Describes an open log.
fn describe_running(spec: &ImageSpec, log: &WriteLog, recorded: RecordedLog<api::LogPlace>) -> api::WriteLogInfo {
    let (stats, mode) = (log.stats(), log.mode());
    let since = wall_clock().saturating_sub(stats.dirty_age).as_millis() as u64;
    api::WriteLogInfo {
        id: id_text(&recorded.id),
        image: spec.to_string(),
        encrypted: Some(log.is_encrypted()),
        state: mode.name().into(),
        reason: mode.reason().cloned().or_else(|| log.backend_error()).map(|error| error.to_string()),
        dirty_entries: stats.dirty_entries,
        dirty_bytes: stats.dirty_bytes,
        dirty_since_ms: (stats.dirty_entries > 0).then_some(since),
        ..api::WriteLogInfo::at(recorded.place)
    }
}
