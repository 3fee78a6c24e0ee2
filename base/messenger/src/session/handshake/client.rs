//! Client's part of a handshake: the result of authentication, and the request for a session.

use super::{
    Established, HandshakeProgress, HandshakeState, MessengerHandshake, RETRIES_MAX, Resume, Role, SessionOrigin,
};
use crate::session::SessionViolation;
use crate::session::auth::SessionKeys;
use crate::wire::control::{AuthDone, ClientIdent, FLAG_LOSSY, Reconnect, ServerIdent};

impl MessengerHandshake {
    pub(super) fn auth_done(&mut self, done: &AuthDone) -> Result<(), SessionViolation> {
        let Role::Client { config, auth, .. } = &mut self.role else { unreachable!("a client") };
        if !config.modes.contains(&done.mode) {
            return Err(SessionViolation::ModeNotOffered(done.mode));
        }
        self.mode = done.mode;
        self.keys = SessionKeys { global_id: done.global_id, ..auth.done(done.mode, &done.payload)? };
        auth.numbered(done.global_id);
        self.protect(true)
    }

    /// Requests a session from the server, new or resumed.
    pub(super) fn begin_session(&mut self) -> Result<(), SessionViolation> {
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
            self.state = HandshakeState::Reconnect;
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
        self.state = HandshakeState::Ident;
        self.send(&ident)
    }

    pub(super) fn retry(&mut self, change: impl FnOnce(&mut Resume)) -> Result<(), SessionViolation> {
        let Role::Client { resume, retries, .. } = &mut self.role else { unreachable!("a client") };
        *retries += 1;
        if *retries > RETRIES_MAX {
            return Err(SessionViolation::Retries);
        }
        change(resume);
        self.begin_session()
    }

    pub(super) fn server_ident(&mut self, ident: ServerIdent) -> Result<HandshakeProgress, SessionViolation> {
        let Role::Client { config, resume, reset, .. } = &self.role else { unreachable!("a client") };
        // A peer reached by a path has no socket address to check; it may listen at other addresses too, and state one
        // of those.
        if config.target.socket.is_some() && !ident.addrs.iter().any(|addr| config.target.means(addr)) {
            let found: Vec<String> = ident.addrs.iter().map(ToString::to_string).collect();
            return Err(SessionViolation::WrongPeer { target: config.target.to_string(), found: found.join(", ") });
        }
        let lacks = config.required & !ident.supported;
        if lacks != 0 {
            return Err(SessionViolation::MessageFeatures(lacks));
        }
        let lossy = config.lossy || ident.flags & FLAG_LOSSY != 0;
        let established = Established {
            outcome: SessionOrigin::Fresh,
            reset: *reset,
            resume: Resume { server_cookie: if lossy { 0 } else { ident.cookie }, ..*resume },
            lossy,
            features: config.supported & ident.supported,
            peer_addrs: ident.addrs,
        };
        self.state = HandshakeState::Over;
        Ok(HandshakeProgress::Established(Box::new(established)))
    }
}
