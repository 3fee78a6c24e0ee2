//! Payloads of control frames ("Authentication", "Message flow handshake", "Message exchange").

use super::addr::EntityAddr;
use super::codec::{MalformedPayload, PayloadReader, PayloadWriter};
use super::frame::Tag;

/// Maximum length of an entity's name in bytes.
pub const NAME_MAX: usize = 256;

/// Authentication methods.
pub mod method {
    /// No authentication: the peer's identity is not verified.
    pub const NONE: u32 = 1;
    /// Cephx, Ceph's own method.
    pub const CEPHX: u32 = 2;
    /// Mutual authentication by a shared key, between Forebay processes: `docs/formats/msgr2.md`.  The number is
    /// otherwise unused; Ceph numbers its methods from 1.
    pub const SHARED_KEY: u32 = 0x4642_0001;
}

/// Connection modes: protection of frames after authentication.
pub mod mode {
    /// CRC32C checksums against accidental corruption.
    pub const CRC: u32 = 1;
    /// AES-128-GCM encryption and authentication.
    pub const SECURE: u32 = 2;

    /// Returns the names of modes, as Ceph's settings have them.
    pub fn names(modes: &[u32]) -> String {
        let name = |mode: &u32| match *mode {
            CRC => "crc".to_owned(),
            SECURE => "secure".to_owned(),
            other => format!("mode {other}"),
        };
        modes.iter().map(name).collect::<Vec<_>>().join(" or ")
    }
}

/// Flag of idents: lossy session, no state is kept across reconnects.
pub const FLAG_LOSSY: u64 = 1;

/// Payload of one kind of control frame.
pub trait ControlPayload: Sized {
    /// Tag of the frame.
    const TAG: Tag;

    /// Appends the encoded payload.
    fn write(&self, out: &mut PayloadWriter);

    /// Reads the payload; fields appended by a later version are skipped.
    fn read(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload>;

    /// Encodes the payload.
    fn encode(&self) -> Vec<u8> {
        let mut out = PayloadWriter::new();
        self.write(&mut out);
        out.finish()
    }

    /// Decodes the payload of a frame.
    fn decode(payload: &[u8]) -> Result<Self, MalformedPayload> {
        Self::read(&mut PayloadReader::new(payload, what(Self::TAG)))
    }
}

/// Returns the name of a payload in errors.
fn what(tag: Tag) -> &'static str {
    match tag {
        Tag::Hello => "a hello",
        Tag::AuthRequest => "an authentication request",
        Tag::AuthBadMethod => "a refusal of a method",
        Tag::AuthReplyMore | Tag::AuthRequestMore => "a step of authentication",
        Tag::AuthDone => "the end of authentication",
        Tag::AuthSignature => "a signature",
        Tag::ClientIdent => "a client's ident",
        Tag::ServerIdent => "a server's ident",
        Tag::IdentMissingFeatures => "a list of missing features",
        Tag::SessionReconnect => "a reconnect",
        Tag::SessionReset => "a session's reset",
        Tag::SessionRetry | Tag::SessionRetryGlobal => "a session's retry",
        Tag::SessionReconnectOk => "the answer to a reconnect",
        Tag::Wait => "a wait",
        Tag::Message => "a message",
        Tag::Keepalive2 | Tag::Keepalive2Ack => "a keepalive",
        Tag::Ack => "an ack",
    }
}

/// Implements [`ControlPayload`] for a struct whose fields are each written and read by a method or function.
macro_rules! control {
    ($(#[$doc:meta])* $name:ident, $tag:ident, { $($(#[$field_doc:meta])* $field:ident: $type:ty => $kind:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        impl ControlPayload for $name {
            const TAG: Tag = Tag::$tag;
            fn write(&self, out: &mut PayloadWriter) {
                let _ = &out;
                $(control!(@write out, &self.$field, $kind);)*
            }
            fn read(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
                let _ = &from;
                Ok(Self { $($field: control!(@read from, $kind),)* })
            }
        }
    };
    (@write $out:ident, $value:expr, addr) => { $value.encode($out) };
    (@write $out:ident, $value:expr, addrs) => { EntityAddr::encode_vector($value, $out) };
    (@write $out:ident, $value:expr, flag) => { $out.u8(u8::from(*$value)) };
    (@write $out:ident, $value:expr, blob) => { $out.blob($value) };
    (@write $out:ident, $value:expr, list) => { $out.list($value) };
    (@write $out:ident, $value:expr, raw32) => { $out.raw($value) };
    (@write $out:ident, $value:expr, $number:ident) => { $out.$number(*$value) };
    (@read $from:ident, addr) => { EntityAddr::decode($from)? };
    (@read $from:ident, addrs) => { EntityAddr::decode_vector($from)? };
    (@read $from:ident, flag) => { $from.u8()? != 0 };
    (@read $from:ident, blob) => { $from.blob()?.to_vec() };
    (@read $from:ident, raw32) => { $from.array::<32>()? };
    (@read $from:ident, $number:ident) => { $from.$number()? };
}

control! {
    /// Hello: the sender's type, and the peer's address as seen by the sender.
    Hello, Hello, {
        /// Entity type, of [`entity`](super::entity).
        entity: u8 => u8,
        /// Address of the peer, as seen by the sender.
        peer: EntityAddr => addr,
    }
}
control! {
    /// Authentication request of the client, with the method it picks.
    AuthRequest, AuthRequest, {
        /// Authentication method, of [`method`].
        method: u32 => u32,
        /// Connection modes, of [`mode`], most preferred first.
        modes: Vec<u32> => list,
        /// Method-specific payload.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// Rejection by a server that accepts other methods or modes.
    AuthBadMethod, AuthBadMethod, {
        /// Method that was requested.
        method: u32 => u32,
        /// Negative error number.
        result: i32 => i32,
        /// Methods that the server accepts.
        methods: Vec<u32> => list,
        /// Modes that the server accepts.
        modes: Vec<u32> => list,
    }
}
control! {
    /// Next authentication step of the server.
    AuthReplyMore, AuthReplyMore, {
        /// Method-specific payload.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// Next authentication step of the client.
    AuthRequestMore, AuthRequestMore, {
        /// Method-specific payload.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// Authentication success.
    AuthDone, AuthDone, {
        /// Global ID of this client, unique in its cluster.
        global_id: u64 => u64,
        /// Connection mode, of [`mode`].
        mode: u32 => u32,
        /// Method-specific payload.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// HMAC-SHA256 under the session key of all bytes that the sender received before.
    AuthSignature, AuthSignature, {
        /// HMAC; zeroes when the method yields no key.
        signature: [u8; 32] => raw32,
    }
}
control! {
    /// Session request of a client.
    ClientIdent, ClientIdent, {
        /// Addresses of the client.
        addrs: Vec<EntityAddr> => addrs,
        /// Address of the peer to reach.
        target: EntityAddr => addr,
        /// Global ID of the client.
        gid: u64 => u64,
        /// Sequence number of the client's connections.
        global_seq: u64 => u64,
        /// Message features supported by the client.
        supported: u64 => u64,
        /// Message features required by the client.
        required: u64 => u64,
        /// Flags: [`FLAG_LOSSY`].
        flags: u64 => u64,
        /// Session ID assigned by the client; zero when lossy.
        cookie: u64 => u64,
    }
}
control! {
    /// Session acceptance of a server.
    ServerIdent, ServerIdent, {
        /// Addresses of the server.
        addrs: Vec<EntityAddr> => addrs,
        /// Global ID of the server.
        gid: u64 => u64,
        /// Sequence number of the server's connections.
        global_seq: u64 => u64,
        /// Message features supported by the server.
        supported: u64 => u64,
        /// Message features required by the server.
        required: u64 => u64,
        /// Flags: [`FLAG_LOSSY`].
        flags: u64 => u64,
        /// Session ID assigned by the server; zero when lossy.
        cookie: u64 => u64,
    }
}
control! {
    /// Session rejection by a server that requires more features.
    IdentMissingFeatures, IdentMissingFeatures, {
        /// Features that the client lacks.
        features: u64 => u64,
    }
}
control! {
    /// Request of a client to resume a session.
    Reconnect, SessionReconnect, {
        /// Addresses of the client.
        addrs: Vec<EntityAddr> => addrs,
        /// Session ID assigned by the client.
        client_cookie: u64 => u64,
        /// Session ID assigned by the server.
        server_cookie: u64 => u64,
        /// Sequence number of the client's connections.
        global_seq: u64 => u64,
        /// Number of attempts to reconnect this session.
        connect_seq: u64 => u64,
        /// Highest sequence number that the client received.
        msg_seq: u64 => u64,
    }
}
control! {
    /// Reset by a server that does not know the session.
    Reset, SessionReset, {
        /// Full reset: everything is lost; otherwise only the server's half, and the client resends its queue.
        full: bool => flag,
    }
}
control! {
    /// Retry request of a server that has seen a later reconnect attempt.
    Retry, SessionRetry, {
        /// Highest number that the server saw.
        connect_seq: u64 => u64,
    }
}
control! {
    /// Retry request of a server that has seen a later connection.
    RetryGlobal, SessionRetryGlobal, {
        /// Highest number that the server saw.
        global_seq: u64 => u64,
    }
}
control! {
    /// Session resumption by the server.
    ReconnectOk, SessionReconnectOk, {
        /// Highest sequence number that the server received.
        msg_seq: u64 => u64,
    }
}
control! {
    /// Wait request of a server that is connecting to the client itself.
    Wait, Wait, {}
}
control! {
    /// Keepalive request.
    Keepalive, Keepalive2, {
        /// Sender's clock: seconds.
        seconds: u32 => u32,
        /// Sender's clock: nanoseconds.
        nanos: u32 => u32,
    }
}
control! {
    /// Keepalive acknowledgement.
    KeepaliveAck, Keepalive2Ack, {
        /// Seconds copied from the request.
        seconds: u32 => u32,
        /// Nanoseconds copied from the request.
        nanos: u32 => u32,
    }
}
control! {
    /// Acknowledgement of messages.
    Ack, Ack, {
        /// Highest sequence number received.
        seq: u64 => u64,
    }
}
