//! Handshake of one connection, from the banner to the agreement on a session.

use std::rc::Rc;

use forebay_reactor::{BufList, BufMut};

use super::Violation;
use super::auth::{AuthClient, AuthError, AuthServer, Keys, ServerStep, same};
use crate::wire::control::{
    AuthBadMethod, AuthDone, AuthReplyMore, AuthRequest, AuthRequestMore, AuthSignature, ClientIdent, Control,
    FLAG_LOSSY, Hello, IdentMissingFeatures, Reconnect, ReconnectOk, Reset, Retry, RetryGlobal, ServerIdent, mode,
};
use crate::wire::{Banner, Decoder, Direction, Encoder, EntityAddr, Frame, Limits, Next, Pools, Tag, Want};

/// Maximum number of bytes that either side sends before authentication is complete.
const TRANSCRIPT_MAX: usize = 64 << 10;
/// Maximum number of authentication requests that a server accepts on a connection.
const AUTH_REQUESTS_MAX: u32 = 3;
/// Maximum number of retry requests that a client follows on a connection.
const RETRIES_MAX: u32 = 16;
/// Frame limits before the peer has authenticated.
const LIMITS_BEFORE_AUTH: Limits = Limits { control_max: 16 << 10, front_max: 0, middle_max: 0, data_max: 0 };

const EACCES: i32 = 13;
const EOPNOTSUPP: i32 = 95;

/// Configuration of a client handshake.
#[derive(Debug, Clone)]
pub struct ClientConfig {
    /// Entity type of this side, of [`entity`](crate::wire::entity).
    pub entity: u8,
    /// Entity type required of the peer; `None` accepts any.
    pub peer_entity: Option<u8>,
    /// Addresses of this side.
    pub addrs: Vec<EntityAddr>,
    /// Address of the peer to reach.
    pub target: EntityAddr,
    /// Global ID of this side.
    pub gid: u64,
    /// Connection modes, of [`mode`], most preferred first.
    pub modes: Vec<u32>,
    /// Message features supported by this side.
    pub supported: u64,
    /// Message features required of the peer.
    pub required: u64,
    /// Lossy session: no state is kept across reconnects.
    pub lossy: bool,
    /// Enables segment checksums in crc mode; both sides must be configured alike.
    pub checksum: bool,
}

/// Configuration of a server handshake.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Entity type of this side, of [`entity`](crate::wire::entity).
    pub entity: u8,
    /// Address of the client, as seen by this side.
    pub peer: EntityAddr,
    /// Connection modes that are accepted, of [`mode`].
    pub modes: Vec<u32>,
    /// Enables segment checksums in crc mode; both sides must be configured alike.
    pub checksum: bool,
}

/// Identifiers and sequence numbers of a session that a client begins or resumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Resume {
    /// Session ID assigned by the client; zero for a lossy one.
    pub client_cookie: u64,
    /// Session ID assigned by the server; zero to begin one.
    pub server_cookie: u64,
    /// Sequence number of the client's connections.
    pub global_seq: u64,
    /// Number of attempts to reconnect this session.
    pub connect_seq: u64,
    /// Highest sequence number received.
    pub in_seq: u64,
}

/// Session request of an authenticated client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asked {
    /// Request for a new session.
    Ident(ClientIdent),
    /// Request to resume a session.
    Reconnect(Reconnect),
}

/// Answer of a server to a session request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// New session accepted.
    Ident(ServerIdent),
    /// Features that the client lacks.
    Missing(u64),
    /// Session resumed; the highest sequence number received.
    ReconnectOk(u64),
    /// Session unknown, or no longer known.
    Reset,
    /// Later reconnect attempt seen; its number.
    Retry(u64),
    /// Later connection seen; its number.
    RetryGlobal(u64),
}

/// Origin of a client's session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// New session.
    Fresh,
    /// Resumed session; the server has received everything up to this sequence number.
    Resumed(u64),
}

/// Result of the handshake, for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Established {
    /// New or resumed session.
    pub outcome: Outcome,
    /// Reset by the server, if it has lost the session that was to be resumed: full (`true`), or only the server's
    /// half.
    pub reset: Option<bool>,
    /// Identifiers and numbers for the next resume.
    pub resume: Resume,
    /// Lossy session: no state is kept across reconnects.
    pub lossy: bool,
    /// Addresses of the server; empty for a resumed session.
    pub peer_addrs: Vec<EntityAddr>,
    /// Message features supported by both sides; zero for a resumed session.
    pub features: u64,
}

/// Progress of the handshake after parsing received bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Progress {
    /// More bytes must be received.
    NeedInput,
    /// Server only: session request of the client; [`Link::answer`] is next.
    Asked(Asked),
    /// Client only: session established, new or resumed.
    Established(Box<Established>),
}

/// Handshake state; also named in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Banner,
    Hello,
    Auth,
    AuthMore,
    Signature,
    Ident,
    Reconnect,
    Asked,
    Over,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            Self::Banner => "exchanging banners",
            Self::Hello => "exchanging hellos",
            Self::Auth | Self::AuthMore => "authenticating",
            Self::Signature => "exchanging signatures",
            Self::Ident => "beginning a session",
            Self::Reconnect => "resuming a session",
            Self::Asked => "answering the session request",
            Self::Over => "completing the handshake",
        }
    }
}

enum Role {
    Client { config: ClientConfig, auth: Box<dyn AuthClient>, resume: Resume, retries: u32, reset: Option<bool> },
    Server { config: ServerConfig, auth: Box<dyn AuthServer>, requests: u32, refused: Option<AuthError>, name: String },
}

/// Bytes exchanged before authentication was complete.
#[derive(Default)]
struct Transcript {
    received: Vec<u8>,
    sent: Vec<u8>,
}

/// Handshake of one connection, from the banner to the agreement on a session.
pub struct Link {
    role: Role,
    state: State,
    decoder: Decoder,
    encoder: Encoder,
    out: BufList,
    transcript: Option<Transcript>,
    keys: Keys,
    /// Expected signature of the peer.
    expected: [u8; 32],
    mode: u32,
    peer_entity: u8,
}

impl Link {
    /// Creates the handshake of a client that begins or resumes a session.
    pub fn client(config: ClientConfig, auth: Box<dyn AuthClient>, resume: Resume, pools: Rc<Pools>) -> Self {
        let checksum = config.checksum;
        Self::new(Role::Client { config, auth, resume, retries: 0, reset: None }, checksum, pools)
    }

    /// Creates the handshake of a server.
    pub fn server(config: ServerConfig, auth: Box<dyn AuthServer>, pools: Rc<Pools>) -> Self {
        let checksum = config.checksum;
        let role = Role::Server { config, auth, requests: 0, refused: None, name: String::new() };
        Self::new(role, checksum, pools)
    }

    fn new(role: Role, checksum: bool, pools: Rc<Pools>) -> Self {
        let mut link = Self {
            role,
            state: State::Banner,
            decoder: Decoder::new(pools.clone(), LIMITS_BEFORE_AUTH, checksum),
            encoder: Encoder::new(pools, checksum),
            out: BufList::new(),
            transcript: Some(Transcript::default()),
            keys: Keys::default(),
            expected: [0; 32],
            mode: 0,
            peer_entity: 0,
        };
        let mut bytes = BufList::new();
        bytes.push(BufMut::copy_of(&Banner::OURS.encode()).freeze());
        link.queue(bytes);
        link
    }

    /// Takes the bytes to send.
    pub fn output(&mut self) -> BufList {
        std::mem::take(&mut self.out)
    }

    /// Returns the buffer to receive into.
    pub fn want(&mut self) -> Want {
        self.decoder.want()
    }

    /// Returns the buffer of [`want`](Self::want), into which `got` bytes were received.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        self.decoder.received(buf, got);
    }

    /// Copies some of `bytes` in as if they had just been received; returns the number of bytes taken.
    pub fn feed(&mut self, bytes: &[u8]) -> usize {
        self.decoder.feed(bytes)
    }

    /// Returns the current step as text.
    pub fn state(&self) -> &'static str {
        self.state.name()
    }

    /// Server only: returns the last authentication error of the client.
    pub fn refused(&self) -> Option<&AuthError> {
        match &self.role {
            Role::Server { refused, .. } => refused.as_ref(),
            Role::Client { .. } => None,
        }
    }

    /// Server only: returns the name of the client; empty without authentication.
    pub fn client_name(&self) -> &str {
        match &self.role {
            Role::Server { name, .. } => name,
            Role::Client { .. } => "",
        }
    }

    /// Client only: returns the address of this side, with the IP address that the peer sees, once it has told.
    pub fn own_addr(&self) -> Option<EntityAddr> {
        match &self.role {
            Role::Client { config, .. } => config.addrs.first().copied(),
            Role::Server { .. } => None,
        }
    }

    /// Returns the entity type of the peer, of [`entity`](crate::wire::entity); known after its hello.
    pub fn peer_entity(&self) -> u8 {
        self.peer_entity
    }

    /// Returns the picked mode, of [`mode`]; known after authentication.
    pub fn mode(&self) -> u32 {
        self.mode
    }

    /// Returns the decoder and encoder for the message phase, and the bytes still to be sent.
    pub fn into_parts(self) -> (Decoder, Encoder, BufList) {
        (self.decoder, self.encoder, self.out)
    }

    fn queue(&mut self, bytes: BufList) {
        if let Some(transcript) = &mut self.transcript {
            bytes.parts().iter().for_each(|part| transcript.sent.extend_from_slice(part));
        }
        self.out.append(bytes);
    }

    fn send<C: Control>(&mut self, payload: &C) -> Result<(), Violation> {
        let mut bytes = BufList::new();
        self.encoder.control(C::TAG, &payload.encode(), &mut bytes)?;
        self.queue(bytes);
        Ok(())
    }

    /// Processes received bytes.  `random` must return unpredictable numbers.
    ///
    /// # Errors
    /// The connection must be ended; other connections are unaffected.
    pub fn step(&mut self, random: &mut dyn FnMut() -> u64) -> Result<Progress, Violation> {
        loop {
            if self.state == State::Banner {
                let Some((banner, bytes)) = self.decoder.banner()? else { return Ok(Progress::NeedInput) };
                if let Some((lacks, wants)) = Banner::OURS.disagreement(&banner) {
                    return Err(Violation::Features { lacks, wants });
                }
                if let Some(transcript) = &mut self.transcript {
                    transcript.received.extend_from_slice(&bytes);
                }
                let (entity, peer) = match &self.role {
                    Role::Client { config, .. } => (config.entity, config.target),
                    Role::Server { config, .. } => (config.entity, config.peer),
                };
                self.state = State::Hello;
                self.send(&Hello { entity, peer })?;
            }
            let transcript = &mut self.transcript;
            let next = self.decoder.next(
                |_| true,
                |bytes| {
                    if let Some(transcript) = transcript {
                        transcript.received.extend_from_slice(bytes);
                    }
                },
            )?;
            if self.transcript.as_ref().is_some_and(|transcript| transcript.received.len() > TRANSCRIPT_MAX) {
                return Err(Violation::TooMuchBeforeAuth(TRANSCRIPT_MAX));
            }
            let Next::Frame(frame) = next else { return Ok(Progress::NeedInput) };
            if let Some(progress) = self.frame(&frame, random)? {
                return Ok(progress);
            }
        }
    }

    fn frame(&mut self, frame: &Frame, random: &mut dyn FnMut() -> u64) -> Result<Option<Progress>, Violation> {
        let client = matches!(self.role, Role::Client { .. });
        let payload = frame.payload();
        match (self.state, frame.tag, client) {
            (State::Hello, Tag::Hello, _) => self.hello(&Hello::decode(payload)?, random)?,
            (State::Auth | State::AuthMore, Tag::AuthBadMethod, true) => {
                let refusal = AuthBadMethod::decode(payload)?;
                let AuthBadMethod { method, result, methods, modes } = refusal;
                let Role::Client { config, .. } = &self.role else { unreachable!("a client") };
                let differ = !modes.is_empty() && !modes.iter().any(|mode| config.modes.contains(mode));
                if result == -EOPNOTSUPP && differ {
                    return Err(Violation::ModesDiffer { ours: config.modes.clone(), theirs: modes });
                }
                return Err(Violation::MethodRefused { method, result, methods, modes });
            }
            (State::Auth | State::AuthMore, Tag::AuthReplyMore, true) => {
                let step = AuthReplyMore::decode(payload)?;
                let Role::Client { auth, .. } = &mut self.role else { unreachable!("a client") };
                let payload = auth.more(&step.payload, random)?;
                self.state = State::AuthMore;
                self.send(&AuthRequestMore { payload })?;
            }
            (State::Auth | State::AuthMore, Tag::AuthDone, true) => self.auth_done(&AuthDone::decode(payload)?)?,
            (State::Auth, Tag::AuthRequest, false) => self.auth_request(&AuthRequest::decode(payload)?, random)?,
            (State::AuthMore, Tag::AuthRequestMore, false) => {
                let step = AuthRequestMore::decode(payload)?;
                let Role::Server { auth, .. } = &mut self.role else { unreachable!("a server") };
                let step = auth.more(&step.payload);
                self.auth_step(step)?;
            }
            (State::Signature, Tag::AuthSignature, _) => self.signature(&AuthSignature::decode(payload)?)?,
            (State::Ident, Tag::ServerIdent, true) => {
                return self.server_ident(ServerIdent::decode(payload)?).map(Some);
            }
            (State::Ident, Tag::IdentMissingFeatures, true) => {
                return Err(Violation::FeaturesRequired(IdentMissingFeatures::decode(payload)?.features));
            }
            (State::Ident | State::Reconnect, Tag::Wait, true) => return Err(Violation::Wait),
            (State::Reconnect, Tag::SessionReset, true) => {
                let full = Reset::decode(payload)?.full;
                let Role::Client { resume, reset, .. } = &mut self.role else { unreachable!("a client") };
                *reset = Some(full);
                let client_cookie = if full { random().max(1) } else { resume.client_cookie };
                *resume = Resume { client_cookie, global_seq: resume.global_seq, ..Resume::default() };
                self.begin_session()?;
            }
            (State::Reconnect, Tag::SessionRetry, true) => {
                let seen = Retry::decode(payload)?.connect_seq;
                self.retry(|resume| resume.connect_seq = seen.saturating_add(1))?;
            }
            (State::Reconnect, Tag::SessionRetryGlobal, true) => {
                let seen = RetryGlobal::decode(payload)?.global_seq;
                self.retry(|resume| resume.global_seq = resume.global_seq.max(seen).saturating_add(1))?;
            }
            (State::Reconnect, Tag::SessionReconnectOk, true) => {
                let Role::Client { config, resume, .. } = &self.role else { unreachable!("a client") };
                let established = Established {
                    outcome: Outcome::Resumed(ReconnectOk::decode(payload)?.msg_seq),
                    reset: None,
                    resume: *resume,
                    lossy: config.lossy,
                    peer_addrs: Vec::new(),
                    features: 0,
                };
                self.state = State::Over;
                return Ok(Some(Progress::Established(Box::new(established))));
            }
            (State::Ident, Tag::ClientIdent, false) => {
                self.state = State::Asked;
                return Ok(Some(Progress::Asked(Asked::Ident(ClientIdent::decode(payload)?))));
            }
            (State::Ident, Tag::SessionReconnect, false) => {
                self.state = State::Asked;
                return Ok(Some(Progress::Asked(Asked::Reconnect(Reconnect::decode(payload)?))));
            }
            (state, tag, _) => return Err(Violation::Unexpected { tag, state: state.name() }),
        }
        Ok(None)
    }

    fn hello(&mut self, hello: &Hello, random: &mut dyn FnMut() -> u64) -> Result<(), Violation> {
        self.peer_entity = hello.entity;
        self.state = State::Auth;
        let Role::Client { config, auth, .. } = &mut self.role else { return Ok(()) };
        if let Some(wanted) = config.peer_entity
            && wanted != hello.entity
        {
            let text = |entity: u8| format!("{} (entity type {entity:#x})", config.target);
            return Err(Violation::WrongPeer { target: text(wanted), found: text(hello.entity) });
        }
        // Ceph daemons require the client's address, and have just reported it.  Forebay servers identify a session by
        // its address, which must not change with the route.
        if let (Some(own), Some(seen)) = (config.addrs.first_mut(), hello.peer.socket)
            && own.socket.is_none()
            && hello.entity != crate::wire::entity::FOREBAY
        {
            own.socket = Some((seen.ip(), 0).into());
        }
        let modes = config.modes.clone();
        let request = AuthRequest { method: auth.method(), payload: auth.begin(&modes, random), modes };
        self.send(&request)
    }

    fn auth_request(&mut self, request: &AuthRequest, random: &mut dyn FnMut() -> u64) -> Result<(), Violation> {
        let Role::Server { config, auth, requests, .. } = &mut self.role else { unreachable!("a server") };
        *requests += 1;
        let mode = request.modes.iter().copied().find(|mode| config.modes.contains(mode));
        let known = auth.methods().contains(&request.method);
        let step = match mode {
            Some(mode) if known => {
                self.mode = mode;
                auth.begin(request, mode, random)
            }
            _ => Err(AuthError::Method(request.method)),
        };
        self.auth_step_for(request.method, step)
    }

    fn auth_step(&mut self, step: Result<ServerStep, AuthError>) -> Result<(), Violation> {
        let Role::Server { auth, .. } = &self.role else { unreachable!("a server") };
        let method = auth.methods().first().copied().unwrap_or_default();
        self.auth_step_for(method, step)
    }

    /// Sends the result of a server's authentication step.
    fn auth_step_for(&mut self, method: u32, step: Result<ServerStep, AuthError>) -> Result<(), Violation> {
        match step {
            Ok(ServerStep::More(payload)) => {
                self.state = State::AuthMore;
                self.send(&AuthReplyMore { payload })
            }
            Ok(ServerStep::Done { payload, keys, name: client }) => {
                let Role::Server { name, refused, .. } = &mut self.role else { unreachable!("a server") };
                *name = client;
                *refused = None;
                let done = AuthDone { global_id: keys.global_id, mode: self.mode, payload };
                self.keys = keys;
                self.send(&done)?;
                self.protect(false)
            }
            Err(error) => {
                let Role::Server { config, auth, requests, refused, .. } = &mut self.role else {
                    unreachable!("a server")
                };
                if *requests >= AUTH_REQUESTS_MAX {
                    return Err(error.into());
                }
                let result = if matches!(error, AuthError::Method(_)) { -EOPNOTSUPP } else { -EACCES };
                let refusal = AuthBadMethod { method, result, methods: auth.methods(), modes: config.modes.clone() };
                *refused = Some(error);
                self.state = State::Auth;
                self.send(&refusal)
            }
        }
    }

    fn auth_done(&mut self, done: &AuthDone) -> Result<(), Violation> {
        let Role::Client { config, auth, .. } = &mut self.role else { unreachable!("a client") };
        if !config.modes.contains(&done.mode) {
            return Err(Violation::ModeNotOffered(done.mode));
        }
        self.mode = done.mode;
        self.keys = Keys { global_id: done.global_id, ..auth.done(done.mode, &done.payload)? };
        auth.numbered(done.global_id);
        self.protect(true)
    }

    /// Switches to the picked mode, and signs the bytes received before.
    fn protect(&mut self, client: bool) -> Result<(), Violation> {
        if self.mode == mode::SECURE {
            let (receive, send) = Direction::pair(&self.keys.connection, client)?;
            self.decoder.secure(receive);
            self.encoder.secure(send);
        }
        self.state = State::Signature;
        let transcript = self.transcript.take().expect("authentication is done once");
        let signature = AuthSignature { signature: self.keys.sign(&transcript.received) };
        self.expected = self.keys.sign(&transcript.sent);
        self.send(&signature)
    }

    fn signature(&mut self, signature: &AuthSignature) -> Result<(), Violation> {
        if !same(&signature.signature, &self.expected) {
            return Err(Violation::Signature);
        }
        self.decoder.set_limits(Limits { control_max: Limits::default().control_max, ..LIMITS_BEFORE_AUTH });
        self.state = State::Ident;
        match self.role {
            Role::Client { .. } => self.begin_session(),
            Role::Server { .. } => Ok(()),
        }
    }

    /// Requests a session from the server, new or resumed.
    fn begin_session(&mut self) -> Result<(), Violation> {
        let Role::Client { config, resume, .. } = &self.role else { unreachable!("a client") };
        if resume.server_cookie != 0 {
            let reconnect = Reconnect {
                addrs: config.addrs.clone(),
                client_cookie: resume.client_cookie,
                server_cookie: resume.server_cookie,
                global_seq: resume.global_seq,
                connect_seq: resume.connect_seq,
                msg_seq: resume.in_seq,
            };
            self.state = State::Reconnect;
            return self.send(&reconnect);
        }
        let ident = ClientIdent {
            addrs: config.addrs.clone(),
            target: config.target,
            // With cephx the global ID is the one that the monitor assigned.
            gid: if self.keys.global_id != 0 { self.keys.global_id } else { config.gid },
            global_seq: resume.global_seq,
            supported: config.supported,
            required: config.required,
            flags: if config.lossy { FLAG_LOSSY } else { 0 },
            cookie: if config.lossy { 0 } else { resume.client_cookie },
        };
        self.state = State::Ident;
        self.send(&ident)
    }

    fn retry(&mut self, change: impl FnOnce(&mut Resume)) -> Result<(), Violation> {
        let Role::Client { resume, retries, .. } = &mut self.role else { unreachable!("a client") };
        *retries += 1;
        if *retries > RETRIES_MAX {
            return Err(Violation::Retries);
        }
        change(resume);
        self.begin_session()
    }

    fn server_ident(&mut self, ident: ServerIdent) -> Result<Progress, Violation> {
        let Role::Client { config, resume, reset, .. } = &self.role else { unreachable!("a client") };
        // A peer reached by a path has no socket address to check; it may listen at other addresses too, and state one
        // of those.
        if config.target.socket.is_some() && !ident.addrs.iter().any(|addr| config.target.means(addr)) {
            let found: Vec<String> = ident.addrs.iter().map(ToString::to_string).collect();
            return Err(Violation::WrongPeer { target: config.target.to_string(), found: found.join(", ") });
        }
        let lacks = config.required & !ident.supported;
        if lacks != 0 {
            return Err(Violation::MessageFeatures(lacks));
        }
        let lossy = config.lossy || ident.flags & FLAG_LOSSY != 0;
        let established = Established {
            outcome: Outcome::Fresh,
            reset: *reset,
            resume: Resume { server_cookie: if lossy { 0 } else { ident.cookie }, ..*resume },
            lossy,
            features: config.supported & ident.supported,
            peer_addrs: ident.addrs,
        };
        self.state = State::Over;
        Ok(Progress::Established(Box::new(established)))
    }

    /// Server only: answers the session request.  Returns true when the connection is ready for messages.
    ///
    /// # Panics
    /// When there is no pending request.
    pub fn answer(&mut self, answer: &Answer) -> Result<bool, Violation> {
        assert_eq!(self.state, State::Asked, "an answer without a question");
        self.state = match answer {
            Answer::Ident(_) | Answer::ReconnectOk(_) => State::Over,
            _ => State::Ident,
        };
        match answer {
            Answer::Ident(ident) => self.send(ident)?,
            Answer::Missing(features) => self.send(&IdentMissingFeatures { features: *features })?,
            Answer::ReconnectOk(msg_seq) => self.send(&ReconnectOk { msg_seq: *msg_seq })?,
            Answer::Reset => self.send(&Reset { full: true })?,
            Answer::Retry(connect_seq) => self.send(&Retry { connect_seq: *connect_seq })?,
            Answer::RetryGlobal(global_seq) => self.send(&RetryGlobal { global_seq: *global_seq })?,
        }
        Ok(self.state == State::Over)
    }
}

#[cfg(test)]
mod tests;
