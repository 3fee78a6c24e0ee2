//! Errors of a connection: why it has ended, and why a message was not sent.

use std::io;

use crate::session::SessionViolation;

/// Reason why a connection has ended, or has no stream at the moment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DisconnectReason {
    /// Protocol violation by the peer, or one side rejected the other.
    #[error(transparent)]
    Violation(#[from] SessionViolation),
    /// Transport error.
    #[error("{1}")]
    Io(io::ErrorKind, String),
    /// Closed by the peer.
    #[error("the peer closed the connection")]
    PeerClosed,
    /// Closed by the peer in the middle of a frame.
    #[error("the peer closed the connection in the middle of a frame")]
    PeerBroke,
    /// Closed by this side.
    #[error("closed by this side")]
    Closed,
    /// Handshake timeout.
    #[error("handshake timeout while {0}")]
    Handshake(&'static str),
    /// Keepalive timeout: the peer is silent, even when asked.
    #[error("the peer is silent: keepalive timeout")]
    Silent,
    /// Frame timeout: a frame was begun and not completed in time.
    #[error("frame timeout: a frame was begun but not completed in time")]
    Slow,
    /// Superseded by another connection of the same peer.
    #[error("superseded by another connection of the same peer")]
    Replaced,
    /// Session reset: the peer has dropped the session, or has begun a new one.
    #[error("the peer has reset the session")]
    Reset,
    /// Session expired: the peer did not reconnect in time.
    #[error("session expired: the peer did not reconnect in time")]
    Expired,
    /// Peer address that is not in the list of allowed networks.
    #[error("{0} is in none of the networks that may connect")]
    NotAllowed(String),
    /// Connection limit reached.
    #[error("connection limit reached: {0} connections")]
    TooMany(usize),
}

impl From<io::Error> for DisconnectReason {
    fn from(error: io::Error) -> Self {
        Self::Io(error.kind(), error.to_string())
    }
}

/// Error of sending a message, or of waiting for its reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// Connection ended.  The message may or may not have been delivered.
    #[error("the connection has ended: {0}")]
    Ended(DisconnectReason),
    /// Send budget exhausted.
    #[error("the send queue of the connection is full")]
    Full,
    /// Transaction ID that is 0, or that of a pending request on this connection.
    #[error("invalid transaction ID {0}: zero, or that of a pending request on this connection")]
    Tid(u64),
    /// Segment longer than the limit.
    #[error("segment of {len} bytes exceeds the limit of {max}")]
    TooLong {
        /// Length in bytes.
        len: usize,
        /// Limit in bytes.
        max: usize,
    },
}
