//! Resources that a process holds, from /proc.

use anyhow::{Context, Result};

/// Resources held at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holdings {
    /// Bytes of memory.
    pub resident: u64,
    /// File descriptors.
    pub files: usize,
}

/// Looks at a process; an error when it is gone.
pub fn holdings(process: u32) -> Result<Holdings> {
    let gone = || format!("process {process} is gone");
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).with_context(gone)?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).with_context(gone)?;
    let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse()?;
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).with_context(gone)?.count();
    Ok(Holdings { resident: kib << 10, files })
}
