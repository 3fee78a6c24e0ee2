//! Resource limits for hosts, for all subsystems of a process together.

use std::time::Duration;

/// Resource limits for hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLimits {
    /// Maximum connections of a core; more are closed as soon as they are accepted.
    pub connections_max: usize,
    /// Maximum connections of a core that are not a queue yet, or whose host has not authenticated yet.
    pub handshakes_max: usize,
    /// Maximum number of controllers at a time.
    pub controllers_max: usize,
    /// Maximum number of controllers of one host, by its NQN.
    pub controllers_per_host: usize,
    /// Maximum number of I/O queues of a controller, at most [`QUEUES_MAX`](crate::session::admin::QUEUES_MAX).
    pub queues_max: u16,
    /// Maximum bytes of command data in flight or not sent yet, per connection.
    pub connection_bytes: usize,
    /// Maximum bytes of command data in flight or not sent yet, for all connections of a host on a core.
    pub host_bytes: usize,
    /// Maximum bytes of command data in flight or not sent yet, for all connections of a core.
    pub core_bytes: usize,
    /// Maximum time from accepting a connection to a successful Connect (and authentication).
    pub handshake_timeout: Duration,
    /// Maximum time for a host to send requested data.
    pub data_timeout: Duration,
    /// Maximum time for commands in flight to end when their connection ends.
    pub drain_timeout: Duration,
}

impl Default for HostLimits {
    fn default() -> Self {
        Self {
            connections_max: 4096,
            handshakes_max: 1024,
            controllers_max: 2048,
            controllers_per_host: 64,
            queues_max: 64,
            connection_bytes: 16 << 20,
            host_bytes: 64 << 20,
            core_bytes: 256 << 20,
            handshake_timeout: Duration::from_secs(20),
            data_timeout: Duration::from_secs(60),
            drain_timeout: Duration::from_secs(10),
        }
    }
}
