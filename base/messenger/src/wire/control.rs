//! The payloads of control frames ("Authentication", "Message flow handshake", "Message exchange").

use super::addr::EntityAddr;
use super::codec::{Malformed, Reader, Writer};
use super::frame::Tag;

/// Text in an entity's name at most, in bytes.
pub const NAME_MAX: usize = 256;

/// Methods of authentication.
pub mod method {
    /// None: the peer is whoever it says it is.
    pub const NONE: u32 = 1;
    /// Ceph's own.
    pub const CEPHX: u32 = 2;
    /// Mutual proof by a shared key, between our own processes: `docs/formats/msgr2.md`.  The number is in nobody's
    /// use; Ceph numbers its methods from 1.
    pub const SHARED_KEY: u32 = 0x4642_0001;
}

/// How frames are protected after authentication.
pub mod mode {
    /// Checksums against accidents.
    pub const CRC: u32 = 1;
    /// AES-128-GCM.
    pub const SECURE: u32 = 2;
}

/// Flag of idents: no session is kept across connections.
pub const FLAG_LOSSY: u64 = 1;

/// The payload of one kind of control frame.
pub trait Control: Sized {
    /// Which kind.
    const TAG: Tag;

    /// Appends the bytes.
    fn write(&self, out: &mut Writer);

    /// Reads it; what a later version appends is passed over.
    fn read(from: &mut Reader<'_>) -> Result<Self, Malformed>;

    /// The bytes.
    fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        self.write(&mut out);
        out.finish()
    }

    /// Reads it from the payload of a frame.
    fn decode(payload: &[u8]) -> Result<Self, Malformed> {
        Self::read(&mut Reader::new(payload, what(Self::TAG)))
    }
}

/// What a payload is called in errors.
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

/// Implements [`Control`] for a struct whose fields are each written and read by a method or function.
macro_rules! control {
    ($(#[$doc:meta])* $name:ident, $tag:ident, { $($(#[$field_doc:meta])* $field:ident: $type:ty => $kind:ident,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }
        impl Control for $name {
            const TAG: Tag = Tag::$tag;
            fn write(&self, out: &mut Writer) {
                let _ = &out;
                $(control!(@write out, &self.$field, $kind);)*
            }
            fn read(from: &mut Reader<'_>) -> Result<Self, Malformed> {
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
    /// Who we are, and where we see the peer.
    Hello, Hello, {
        /// One of [`entity`](super::entity).
        entity: u8 => u8,
        /// The peer's address, as the sender sees it.
        peer: EntityAddr => addr,
    }
}
control! {
    /// The client picks a method.
    AuthRequest, AuthRequest, {
        /// One of [`method`].
        method: u32 => u32,
        /// Of [`mode`], the most wanted first.
        modes: Vec<u32> => list,
        /// The method's own.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// The server takes other methods or modes.
    AuthBadMethod, AuthBadMethod, {
        /// The method it was asked for.
        method: u32 => u32,
        /// A negative error number.
        result: i32 => i32,
        /// Methods it takes.
        methods: Vec<u32> => list,
        /// Modes it takes.
        modes: Vec<u32> => list,
    }
}
control! {
    /// The server's next step.
    AuthReplyMore, AuthReplyMore, {
        /// The method's own.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// The client's next step.
    AuthRequestMore, AuthRequestMore, {
        /// The method's own.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// The peer is who it says it is.
    AuthDone, AuthDone, {
        /// A number for this client, unique in its cluster.
        global_id: u64 => u64,
        /// One of [`mode`].
        mode: u32 => u32,
        /// The method's own.
        payload: Vec<u8> => blob,
    }
}
control! {
    /// HMAC-SHA256, by the session's key, of all that its sender received before.
    AuthSignature, AuthSignature, {
        /// The HMAC; zeroes when the method brought no key.
        signature: [u8; 32] => raw32,
    }
}
control! {
    /// The client begins a session.
    ClientIdent, ClientIdent, {
        /// Its own addresses.
        addrs: Vec<EntityAddr> => addrs,
        /// Whom it wants to reach.
        target: EntityAddr => addr,
        /// Its number.
        gid: u64 => u64,
        /// Counts its connections.
        global_seq: u64 => u64,
        /// Features of messages that it knows.
        supported: u64 => u64,
        /// Features that it asks for.
        required: u64 => u64,
        /// [`FLAG_LOSSY`].
        flags: u64 => u64,
        /// Names the session; zero when it is lossy.
        cookie: u64 => u64,
    }
}
control! {
    /// The server agrees to a session.
    ServerIdent, ServerIdent, {
        /// Its own addresses.
        addrs: Vec<EntityAddr> => addrs,
        /// Its number.
        gid: u64 => u64,
        /// Counts its connections.
        global_seq: u64 => u64,
        /// Features of messages that it knows.
        supported: u64 => u64,
        /// Features that it asks for.
        required: u64 => u64,
        /// [`FLAG_LOSSY`].
        flags: u64 => u64,
        /// Names the session; zero when it is lossy.
        cookie: u64 => u64,
    }
}
control! {
    /// The server wants more.
    IdentMissingFeatures, IdentMissingFeatures, {
        /// What the client lacks.
        features: u64 => u64,
    }
}
control! {
    /// The client goes on with a session.
    Reconnect, SessionReconnect, {
        /// Its own addresses.
        addrs: Vec<EntityAddr> => addrs,
        /// The session's name by the client.
        client_cookie: u64 => u64,
        /// The session's name by the server.
        server_cookie: u64 => u64,
        /// Counts its connections.
        global_seq: u64 => u64,
        /// Counts the attempts of this session to reconnect.
        connect_seq: u64 => u64,
        /// The highest sequence number it received.
        msg_seq: u64 => u64,
    }
}
control! {
    /// The server does not know that session.
    Reset, SessionReset, {
        /// Everything is lost; otherwise only the server's half, and the client begins anew with what it has to send.
        full: bool => flag,
    }
}
control! {
    /// The server has seen a later attempt.
    Retry, SessionRetry, {
        /// The highest that it saw.
        connect_seq: u64 => u64,
    }
}
control! {
    /// The server has seen a later connection.
    RetryGlobal, SessionRetryGlobal, {
        /// The highest that it saw.
        global_seq: u64 => u64,
    }
}
control! {
    /// The session goes on.
    ReconnectOk, SessionReconnectOk, {
        /// The highest sequence number the server received.
        msg_seq: u64 => u64,
    }
}
control! {
    /// The server is just connecting to the client itself.
    Wait, Wait, {}
}
control! {
    /// Are you there?
    Keepalive, Keepalive2, {
        /// The sender's clock: seconds.
        seconds: u32 => u32,
        /// The sender's clock: nanoseconds.
        nanos: u32 => u32,
    }
}
control! {
    /// Yes.
    KeepaliveAck, Keepalive2Ack, {
        /// From the question.
        seconds: u32 => u32,
        /// From the question.
        nanos: u32 => u32,
    }
}
control! {
    /// Messages have arrived.
    Ack, Ack, {
        /// The highest sequence number received.
        seq: u64 => u64,
    }
}
