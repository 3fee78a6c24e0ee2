//! Counters of runs of replicated write logs.

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ReplicationTally {
    /// Number of runs.
    pub runs: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Gateways that took the log over.
    pub takeovers: u64,
    /// Primaries that opened the log again.
    pub reopened: u64,
    /// Gateways that died, ...
    pub died: u64,
    /// ... and those that died with their machine.
    pub power_failures: u64,
    /// Gateways that died between two stores to persistent memory.
    pub torn: u64,
    /// Runs with logs in persistent memory only, ...
    pub pmem: u64,
    /// ... and those with a log on disks that has copies in persistent memory.
    pub mixed: u64,
    /// Runs with logs in memory that ends with its process, ...
    pub dram: u64,
    /// ... those that ended when every process that had all acknowledged writes had died, ...
    pub all_lost: u64,
    /// ... and times that a log was given up because no replica was left.
    pub mirrors_lost: u64,
    /// Blocks whose payloads were written into replicas' copies through memory windows.
    pub placed: u64,
    /// Writes of former primaries through windows, which arrived late and were refused.
    pub late_writes: u64,
    /// Changes of the record.
    pub changes: u64,
    /// Members that were filled.
    pub filled: u64,
    /// Members that were dropped.
    pub dropped: u64,
    /// Connections that were cut.
    pub cuts: u64,
    /// Attempts to serve that failed.
    pub refused: u64,
    /// Requests that the backend refused because their client was fenced.
    pub fenced: u64,
    /// Logs that were given up because their primary's medium had failed.
    pub released: u64,
    /// Disks that failed for a while.
    pub failed_disks: u64,
    /// Runs of encrypted volumes, ...
    pub encrypted: u64,
    /// ... payloads that were encrypted in them, ...
    pub payloads_encrypted: u64,
    /// ... and media of other runs on which data of the volume was seen.
    pub seen: u64,
    /// Times that two gateways took the log over at once.
    pub contended: u64,
    /// Reads that a former primary answered while another one took over.
    pub late_reads: u64,
}

impl ReplicationTally {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.requests += other.requests;
        self.takeovers += other.takeovers;
        self.reopened += other.reopened;
        self.died += other.died;
        self.power_failures += other.power_failures;
        self.torn += other.torn;
        self.pmem += other.pmem;
        self.mixed += other.mixed;
        self.dram += other.dram;
        self.all_lost += other.all_lost;
        self.mirrors_lost += other.mirrors_lost;
        self.placed += other.placed;
        self.late_writes += other.late_writes;
        self.changes += other.changes;
        self.filled += other.filled;
        self.dropped += other.dropped;
        self.cuts += other.cuts;
        self.refused += other.refused;
        self.fenced += other.fenced;
        self.released += other.released;
        self.failed_disks += other.failed_disks;
        self.encrypted += other.encrypted;
        self.payloads_encrypted += other.payloads_encrypted;
        self.seen += other.seen;
        self.contended += other.contended;
        self.late_reads += other.late_reads;
    }
}
