//! Handshake of one connection, from the banner to the agreement on a session.

mod client;
mod server;
mod types;

use std::rc::Rc;

use forebay_reactor::{BufList, BufMut};

use self::server::EOPNOTSUPP;
pub use self::types::{
    ClientConfig, Established, HandshakeProgress, Resume, ServerConfig, SessionOrigin, SessionReply, SessionRequest,
};
use super::SessionViolation;
use super::auth::{AuthClient, AuthError, AuthServer, SessionKeys, same};
use crate::wire::control::{
    AuthBadMethod, AuthDone, AuthReplyMore, AuthRequest, AuthRequestMore, AuthSignature, ClientIdent, ControlPayload,
    Hello, IdentMissingFeatures, Reconnect, ReconnectOk, Reset, Retry, RetryGlobal, ServerIdent, mode,
};
use crate::wire::{
    Banner, Direction, Encoder, EntityAddr, Frame, FrameBuffer, FrameDecoder, MessengerPools, ParseProgress,
    SegmentLimits, Tag,
};

/// Maximum number of bytes that either side sends before authentication is complete.
const TRANSCRIPT_MAX: usize = 64 << 10;
/// Maximum number of authentication requests that a server accepts on a connection.
const AUTH_REQUESTS_MAX: u32 = 3;
/// Maximum number of retry requests that a client follows on a connection.
const RETRIES_MAX: u32 = 16;
/// Frame limits before the peer has authenticated.
const LIMITS_BEFORE_AUTH: SegmentLimits =
    SegmentLimits { control_max: 16 << 10, front_max: 0, middle_max: 0, data_max: 0 };

/// Handshake state; also named in errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HandshakeState {
    Banner,
    Hello,
    Auth,
    AuthMore,
    Signature,
    Ident,
    Reconnect,
    Deciding,
    Over,
}

impl HandshakeState {
    fn name(self) -> &'static str {
        match self {
            Self::Banner => "exchanging banners",
            Self::Hello => "exchanging hellos",
            Self::Auth | Self::AuthMore => "authenticating",
            Self::Signature => "exchanging signatures",
            Self::Ident => "beginning a session",
            Self::Reconnect => "resuming a session",
            Self::Deciding => "answering the session request",
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
pub struct MessengerHandshake {
    role: Role,
    state: HandshakeState,
    decoder: FrameDecoder,
    encoder: Encoder,
    out: BufList,
    transcript: Option<Transcript>,
    keys: SessionKeys,
    /// Expected signature of the peer.
    expected: [u8; 32],
    mode: u32,
    peer_entity: u8,
}

impl MessengerHandshake {
    /// Creates the handshake of a client that begins or resumes a session.
    pub fn client(config: ClientConfig, auth: Box<dyn AuthClient>, resume: Resume, pools: Rc<MessengerPools>) -> Self {
        let checksum = config.checksum;
        Self::new(Role::Client { config, auth, resume, retries: 0, reset: None }, checksum, pools)
    }

    /// Creates the handshake of a server.
    pub fn server(config: ServerConfig, auth: Box<dyn AuthServer>, pools: Rc<MessengerPools>) -> Self {
        let checksum = config.checksum;
        let role = Role::Server { config, auth, requests: 0, refused: None, name: String::new() };
        Self::new(role, checksum, pools)
    }

    fn new(role: Role, checksum: bool, pools: Rc<MessengerPools>) -> Self {
        let mut link = Self {
            role,
            state: HandshakeState::Banner,
            decoder: FrameDecoder::new(pools.clone(), LIMITS_BEFORE_AUTH, checksum),
            encoder: Encoder::new(pools, checksum),
            out: BufList::new(),
            transcript: Some(Transcript::default()),
            keys: SessionKeys::default(),
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
    pub fn want(&mut self) -> FrameBuffer {
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
    pub fn into_parts(self) -> (FrameDecoder, Encoder, BufList) {
        (self.decoder, self.encoder, self.out)
    }

    fn queue(&mut self, bytes: BufList) {
        if let Some(transcript) = &mut self.transcript {
            bytes.parts().iter().for_each(|part| transcript.sent.extend_from_slice(part));
        }
        self.out.append(bytes);
    }

    fn send<C: ControlPayload>(&mut self, payload: &C) -> Result<(), SessionViolation> {
        let mut bytes = BufList::new();
        self.encoder.control(C::TAG, &payload.encode(), &mut bytes)?;
        self.queue(bytes);
        Ok(())
    }

    /// Processes received bytes.  `random` must return unpredictable numbers.
    ///
    /// # Errors
    /// The connection must be ended; other connections are unaffected.
    pub fn step(&mut self, random: &mut dyn FnMut() -> u64) -> Result<HandshakeProgress, SessionViolation> {
        loop {
            if self.state == HandshakeState::Banner {
                let Some((banner, bytes)) = self.decoder.banner()? else { return Ok(HandshakeProgress::NeedInput) };
                if let Some((lacks, wants)) = Banner::OURS.disagreement(&banner) {
                    return Err(SessionViolation::Features { lacks, wants });
                }
                if let Some(transcript) = &mut self.transcript {
                    transcript.received.extend_from_slice(&bytes);
                }
                let (entity, peer) = match &self.role {
                    Role::Client { config, .. } => (config.entity, config.target),
                    Role::Server { config, .. } => (config.entity, config.peer),
                };
                self.state = HandshakeState::Hello;
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
                return Err(SessionViolation::TooMuchBeforeAuth(TRANSCRIPT_MAX));
            }
            let ParseProgress::Frame(frame) = next else { return Ok(HandshakeProgress::NeedInput) };
            if let Some(progress) = self.frame(&frame, random)? {
                return Ok(progress);
            }
        }
    }

    fn frame(
        &mut self,
        frame: &Frame,
        random: &mut dyn FnMut() -> u64,
    ) -> Result<Option<HandshakeProgress>, SessionViolation> {
        let client = matches!(self.role, Role::Client { .. });
        let payload = frame.payload();
        match (self.state, frame.tag, client) {
            (HandshakeState::Hello, Tag::Hello, _) => self.hello(&Hello::decode(payload)?, random)?,
            (HandshakeState::Auth | HandshakeState::AuthMore, Tag::AuthBadMethod, true) => {
                let refusal = AuthBadMethod::decode(payload)?;
                let AuthBadMethod { method, result, methods, modes } = refusal;
                let Role::Client { config, .. } = &self.role else { unreachable!("a client") };
                let differ = !modes.is_empty() && !modes.iter().any(|mode| config.modes.contains(mode));
                if result == -EOPNOTSUPP && differ {
                    return Err(SessionViolation::ModesDiffer { ours: config.modes.clone(), theirs: modes });
                }
                return Err(SessionViolation::MethodRefused { method, result, methods, modes });
            }
            (HandshakeState::Auth | HandshakeState::AuthMore, Tag::AuthReplyMore, true) => {
                let step = AuthReplyMore::decode(payload)?;
                let Role::Client { auth, .. } = &mut self.role else { unreachable!("a client") };
                let payload = auth.more(&step.payload, random)?;
                self.state = HandshakeState::AuthMore;
                self.send(&AuthRequestMore { payload })?;
            }
            (HandshakeState::Auth | HandshakeState::AuthMore, Tag::AuthDone, true) => {
                self.auth_done(&AuthDone::decode(payload)?)?
            }
            (HandshakeState::Auth, Tag::AuthRequest, false) => {
                self.auth_request(&AuthRequest::decode(payload)?, random)?
            }
            (HandshakeState::AuthMore, Tag::AuthRequestMore, false) => {
                let step = AuthRequestMore::decode(payload)?;
                let Role::Server { auth, .. } = &mut self.role else { unreachable!("a server") };
                let step = auth.more(&step.payload);
                self.auth_step(step)?;
            }
            (HandshakeState::Signature, Tag::AuthSignature, _) => self.signature(&AuthSignature::decode(payload)?)?,
            (HandshakeState::Ident, Tag::ServerIdent, true) => {
                return self.server_ident(ServerIdent::decode(payload)?).map(Some);
            }
            (HandshakeState::Ident, Tag::IdentMissingFeatures, true) => {
                return Err(SessionViolation::FeaturesRequired(IdentMissingFeatures::decode(payload)?.features));
            }
            (HandshakeState::Ident | HandshakeState::Reconnect, Tag::Wait, true) => return Err(SessionViolation::Wait),
            (HandshakeState::Reconnect, Tag::SessionReset, true) => {
                let full = Reset::decode(payload)?.full;
                let Role::Client { resume, reset, .. } = &mut self.role else { unreachable!("a client") };
                *reset = Some(full);
                let client_cookie = if full { random().max(1) } else { resume.client_cookie };
                *resume = Resume { client_cookie, global_seq: resume.global_seq, ..Resume::default() };
                self.begin_session()?;
            }
            (HandshakeState::Reconnect, Tag::SessionRetry, true) => {
                let seen = Retry::decode(payload)?.connect_seq;
                self.retry(|resume| resume.connect_seq = seen.saturating_add(1))?;
            }
            (HandshakeState::Reconnect, Tag::SessionRetryGlobal, true) => {
                let seen = RetryGlobal::decode(payload)?.global_seq;
                self.retry(|resume| resume.global_seq = resume.global_seq.max(seen).saturating_add(1))?;
            }
            (HandshakeState::Reconnect, Tag::SessionReconnectOk, true) => {
                let Role::Client { config, resume, .. } = &self.role else { unreachable!("a client") };
                let established = Established {
                    outcome: SessionOrigin::Resumed(ReconnectOk::decode(payload)?.msg_seq),
                    reset: None,
                    resume: *resume,
                    lossy: config.lossy,
                    peer_addrs: Vec::new(),
                    features: 0,
                };
                self.state = HandshakeState::Over;
                return Ok(Some(HandshakeProgress::Established(Box::new(established))));
            }
            (HandshakeState::Ident, Tag::ClientIdent, false) => {
                self.state = HandshakeState::Deciding;
                return Ok(Some(HandshakeProgress::SessionRequest(SessionRequest::Ident(ClientIdent::decode(
                    payload,
                )?))));
            }
            (HandshakeState::Ident, Tag::SessionReconnect, false) => {
                self.state = HandshakeState::Deciding;
                return Ok(Some(HandshakeProgress::SessionRequest(SessionRequest::Reconnect(Reconnect::decode(
                    payload,
                )?))));
            }
            (state, tag, _) => return Err(SessionViolation::Unexpected { tag, state: state.name() }),
        }
        Ok(None)
    }

    fn hello(&mut self, hello: &Hello, random: &mut dyn FnMut() -> u64) -> Result<(), SessionViolation> {
        self.peer_entity = hello.entity;
        self.state = HandshakeState::Auth;
        let Role::Client { config, auth, .. } = &mut self.role else { return Ok(()) };
        if let Some(wanted) = config.peer_entity
            && wanted != hello.entity
        {
            let text = |entity: u8| format!("{} (entity type {entity:#x})", config.target);
            return Err(SessionViolation::WrongPeer { target: text(wanted), found: text(hello.entity) });
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

    /// Switches to the picked mode, and signs the bytes received before.
    fn protect(&mut self, client: bool) -> Result<(), SessionViolation> {
        if self.mode == mode::SECURE {
            let (receive, send) = Direction::pair(&self.keys.connection, client)?;
            self.decoder.secure(receive);
            self.encoder.secure(send);
        }
        self.state = HandshakeState::Signature;
        let transcript = self.transcript.take().expect("authentication is done once");
        let signature = AuthSignature { signature: self.keys.sign(&transcript.received) };
        self.expected = self.keys.sign(&transcript.sent);
        self.send(&signature)
    }

    fn signature(&mut self, signature: &AuthSignature) -> Result<(), SessionViolation> {
        if !same(&signature.signature, &self.expected) {
            return Err(SessionViolation::Signature);
        }
        self.decoder
            .set_limits(SegmentLimits { control_max: SegmentLimits::default().control_max, ..LIMITS_BEFORE_AUTH });
        self.state = HandshakeState::Ident;
        match self.role {
            Role::Client { .. } => self.begin_session(),
            Role::Server { .. } => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
