//! Login phase: carries PDUs between the socket and the login state machine.

use std::io;

use forebay_reactor::time::Sleep;
use forebay_reactor::{Addr, Stream, now, random, sleep_until, wall_clock};
use forebay_serve::{ConnectionStopSignal, Interrupted};

use super::IscsiServer;
use crate::session::login::{LoggedIn, Login, LoginAction, SEED_LEN, refuse};
use crate::session::receive::{Garbled, PduReceiver, PduRules};
use crate::session::reply::IscsiReplies;
use crate::sessions::SessionRegistration;
use crate::stats::ConnectionEvent;
use crate::wire::{LoginRequest, request};

/// Maximum data segment length during login in bytes: twice what the protocol allows before negotiation.
const DATA_MAX: usize = 16 * 1024;

/// Reason for a login without a session.
#[derive(Debug, thiserror::Error)]
pub(super) enum LoginEnd {
    #[error("{0}")]
    Garbled(#[from] Garbled),
    #[error("{reason}")]
    Refused { initiator: Option<String>, target: Option<String>, reason: String },
    #[error("PDU with opcode {0:#04x} before the login")]
    NoLogin(u8),
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error("the initiator closed the connection")]
    Closed,
    #[error("{0}")]
    Interrupted(#[from] Interrupted),
}

impl LoginEnd {
    /// Returns true if the initiator is at fault.
    pub(super) fn is_cause(&self) -> bool {
        matches!(
            self,
            LoginEnd::Garbled(_)
                | LoginEnd::Refused { .. }
                | LoginEnd::NoLogin(_)
                | LoginEnd::Interrupted(Interrupted::TooSlow)
        )
    }
}

/// Connection with an established session.
pub(super) struct LoggedInConnection {
    pub(super) login: LoggedIn,
    pub(super) entered: SessionRegistration,
    pub(super) receiver: PduReceiver,
}

pub(super) struct IscsiHandshake<'a> {
    pub(super) server: &'a IscsiServer,
    pub(super) control: &'a ConnectionStopSignal,
    pub(super) stream: &'a Stream,
    pub(super) peer: &'a Addr,
}

impl IscsiHandshake<'_> {
    /// Runs the login phase.
    pub(super) async fn run(self) -> Result<LoggedInConnection, LoginEnd> {
        let IscsiServer { targets, options, pools, .. } = self.server;
        let mut patience = sleep_until(now() + options.login_timeout);
        let mut seed = [0; SEED_LEN];
        seed.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()[..chunk.len()]));
        let mut login = Login::new(options.offer, seed);
        let rules = PduRules { data_max: DATA_MAX, ..PduRules::default() };
        let mut receiver = PduReceiver::new(pools.clone(), rules);
        let mut replies = IscsiReplies::new(pools.clone());
        loop {
            let Some(pdu) = receiver.next_pdu()? else {
                let want = receiver.want();
                let (result, buf) = self.within(&mut patience, self.stream.recv(want.buf)).await?;
                match result? {
                    0 => return Err(LoginEnd::Closed),
                    got => receiver.received(buf, got),
                }
                continue;
            };
            if pdu.bhs.opcode() != request::LOGIN {
                return Err(LoginEnd::NoLogin(pdu.bhs.opcode()));
            }
            let data = pdu.data.to_vec();
            let mut step = login.request(pdu.bhs.view::<LoginRequest>(), &data, targets);
            let mut session = None;
            if let LoginAction::Session(logged_in) = &step.action {
                let entered = targets.enter(logged_in, self.peer.to_string(), wall_clock());
                match self.within(&mut patience, entered).await? {
                    Ok(entered) => {
                        if logged_in.target.is_some() || step.response.tsih.get() == 0 {
                            step.response.tsih = entered.session().tsih.into();
                        }
                        let last = logged_in.cmd_sn.wrapping_add(options.commands_max).wrapping_sub(1);
                        step.response.exp_cmd_sn = logged_in.cmd_sn.into();
                        step.response.max_cmd_sn = last.into();
                        session = Some(entered);
                    }
                    Err((status, why)) => {
                        refuse(&mut step.response, status);
                        step.text.clear();
                        step.action = LoginAction::Close(why.into());
                    }
                }
            }
            replies.pdu_with(&step.response, &step.text);
            self.within(&mut patience, self.stream.send(replies.take())).await??;
            match (step.action, session) {
                (LoginAction::More, _) => {}
                (LoginAction::Session(login), Some(entered)) => {
                    let params = &login.params;
                    receiver.set_rules(PduRules {
                        header_digest: params.header_digest,
                        data_digest: params.data_digest,
                        data_max: params.receive_max as usize,
                    });
                    return Ok(LoggedInConnection { login: *login, entered, receiver });
                }
                (LoginAction::Close(reason), _) => {
                    targets.counters().count(ConnectionEvent::LoginRefused);
                    let name = |name: Option<&str>| name.map(str::to_owned);
                    let (initiator, target) = (name(login.initiator()), name(login.target()));
                    return Err(LoginEnd::Refused { initiator, target, reason });
                }
                // Without a session, the final response was a refusal.
                (LoginAction::Session(_), None) => return Err(LoginEnd::Closed),
            }
        }
    }

    /// Awaits `future`. Fails when the login times out or the server stops.
    async fn within<F: Future>(&self, patience: &mut Sleep, future: F) -> Result<F::Output, LoginEnd> {
        Ok(self.control.within(patience, future).await?)
    }
}
