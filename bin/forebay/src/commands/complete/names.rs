//! Names that the running daemon knows, for completion.

use std::sync::mpsc;
use std::time::Duration;

use super::Candidate;
use crate::cli::GlobalArgs;
use crate::client::session::CommandSession;
use crate::failure::Result;
use crate::ops::{ListNames, ListPools, ListTargets};
use crate::spec::{ImageSpec, LOCAL_POOL};

/// Deadline for all requests to the daemon: the prompt waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// Kind of name that is completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameKind {
    /// An image: `POOL/IMAGE`.
    Image,
    /// An image that is to be made, of whose name only the pool is known.
    NewImage,
    /// An image that is exported.
    Export,
    /// A pool.
    Pool,
}

/// Returns the names that begin with `typed`, or nothing when no daemon answers in time.
pub fn find(global: &GlobalArgs, kind: NameKind, typed: &str) -> Vec<Candidate> {
    let (sender, found) = mpsc::channel();
    let (global, typed) = (global.clone(), typed.to_owned());
    // A connection to a daemon that hangs may never answer; this thread ends with the process.
    std::thread::spawn(move || {
        // The receiver may have timed out.
        let _ = sender.send(ask(&global, kind, &typed));
    });
    found.recv_timeout(PATIENCE).ok().and_then(Result::ok).unwrap_or_default()
}

fn ask(global: &GlobalArgs, kind: NameKind, typed: &str) -> Result<Vec<Candidate>> {
    let daemon = CommandSession::daemon(global)?;
    if kind == NameKind::Export {
        let targets = daemon.call(&ListTargets, Some(PATIENCE), |_| {})?;
        let mut exported: Vec<_> = targets
            .into_iter()
            .filter_map(|target| Some((typable(&target.pool, &target.image)?, target.front.name())))
            .collect();
        exported.sort_unstable();
        // An image that is exported over two fronts is one word.
        exported.dedup_by(|next, first| next.0 == first.0);
        return Ok(exported.into_iter().map(|(word, front)| Candidate::new(word, format!("over {front}"))).collect());
    }
    let names = |pool: &str, prefix: &str| {
        daemon.call(&ListNames { pool: pool.into(), prefix: prefix.into() }, Some(PATIENCE), |_| {})
    };
    if let Some((pool, prefix)) = typed.split_once('/') {
        if kind != NameKind::Image {
            return Ok(Vec::new());
        }
        let found = names(pool, prefix)?;
        return Ok(found.iter().filter_map(|name| Some(Candidate::new(typable(pool, name)?, "image"))).collect());
    }
    let pools = daemon.call(&ListPools, Some(PATIENCE), |_| {})?;
    let end = if kind == NameKind::Pool { "" } else { "/" };
    let mut found: Vec<_> = pools.iter().map(|pool| Candidate::new(format!("{pool}{end}"), "pool")).collect();
    // The pool 'local' may be left out; without anything typed its images would hide the pools.
    if kind == NameKind::Image && !typed.is_empty() {
        let local = names(LOCAL_POOL, typed).unwrap_or_default();
        let typable = local.into_iter().filter(|name| typable(LOCAL_POOL, name).is_some());
        found.extend(typable.map(|name| Candidate::new(name, "image")));
    }
    Ok(found)
}

/// Returns an image's spec, if commands take it: other programs make images with spaces and slashes in their names.
fn typable(pool: &str, image: &str) -> Option<String> {
    ImageSpec::new(pool, image).ok().map(|_| format!("{pool}/{image}"))
}
