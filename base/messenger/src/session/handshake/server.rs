//! Server's part of a handshake: authentication of the client, and the reply to its session request.

use super::{AUTH_REQUESTS_MAX, HandshakeState, MessengerHandshake, Role, SessionReply};
use crate::session::SessionViolation;
use crate::session::auth::{AuthError, ServerStep};
use crate::wire::control::{
    AuthBadMethod, AuthDone, AuthReplyMore, AuthRequest, IdentMissingFeatures, ReconnectOk, Reset, Retry, RetryGlobal,
};

const EACCES: i32 = 13;
pub(super) const EOPNOTSUPP: i32 = 95;

impl MessengerHandshake {
    pub(super) fn auth_request(
        &mut self,
        request: &AuthRequest,
        random: &mut dyn FnMut() -> u64,
    ) -> Result<(), SessionViolation> {
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

    pub(super) fn auth_step(&mut self, step: Result<ServerStep, AuthError>) -> Result<(), SessionViolation> {
        let Role::Server { auth, .. } = &self.role else { unreachable!("a server") };
        let method = auth.methods().first().copied().unwrap_or_default();
        self.auth_step_for(method, step)
    }

    /// Sends the result of a server's authentication step.
    pub(super) fn auth_step_for(
        &mut self,
        method: u32,
        step: Result<ServerStep, AuthError>,
    ) -> Result<(), SessionViolation> {
        match step {
            Ok(ServerStep::More(payload)) => {
                self.state = HandshakeState::AuthMore;
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
                self.state = HandshakeState::Auth;
                self.send(&refusal)
            }
        }
    }

    /// Server only: answers the session request.  Returns true when the connection is ready for messages.
    ///
    /// # Panics
    /// When there is no pending request.
    pub fn answer(&mut self, answer: &SessionReply) -> Result<bool, SessionViolation> {
        assert_eq!(self.state, HandshakeState::Deciding, "an answer without a question");
        self.state = match answer {
            SessionReply::Ident(_) | SessionReply::ReconnectOk(_) => HandshakeState::Over,
            _ => HandshakeState::Ident,
        };
        match answer {
            SessionReply::Ident(ident) => self.send(ident)?,
            SessionReply::Missing(features) => self.send(&IdentMissingFeatures { features: *features })?,
            SessionReply::ReconnectOk(msg_seq) => self.send(&ReconnectOk { msg_seq: *msg_seq })?,
            SessionReply::Reset => self.send(&Reset { full: true })?,
            SessionReply::Retry(connect_seq) => self.send(&Retry { connect_seq: *connect_seq })?,
            SessionReply::RetryGlobal(global_seq) => self.send(&RetryGlobal { global_seq: *global_seq })?,
        }
        Ok(self.state == HandshakeState::Over)
    }
}
