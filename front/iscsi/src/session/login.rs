//! Login state machine: processes requests, builds responses, and yields a session (RFC 7143, chapters 6 and 11.12).

use std::mem;

use super::chap::{self, Algorithm, Challenge, Chap};
use super::params::{Negotiator, Offer, Params};
use super::text::{self, Pair, TEXT_MAX};
use crate::wire::{self, CONTINUE, FINAL, LoginRequest, LoginResponse, login_status as status, response};

/// Maximum number of requests in one login.
const REQUESTS_MAX: u32 = 64;

/// Length in bytes of the random seed of a login.
pub const SEED_LEN: usize = 1 + chap::CHALLENGE_LEN;

/// Lookup of targets and sessions during login.
pub trait LoginDirectory {
    /// Returns how `initiator` has to authenticate for `target`, or why it has no access.
    fn target(&self, target: &str, initiator: &str) -> Result<LoginAccess, Denied>;

    /// Returns how `initiator` has to authenticate for discovery, or why it has no access.
    fn discovery(&self, initiator: &str) -> Result<LoginAccess, Denied>;

    /// Returns true if there is a session with this TSIH.
    fn has_session(&self, tsih: u16) -> bool;
}

/// Access settings of a login.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoginAccess {
    /// Target id, unique among all targets past and future; 0 for discovery.
    pub target_id: u64,
    /// Target portal group tag of the target; 0 for discovery.
    pub portal_group: u16,
    /// CHAP settings; without them no authentication is required.
    pub chap: Option<Chap>,
}

/// Reason for a denied login.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// Target not found.
    #[error("target not found")]
    NotFound,
    /// Initiator is not in the target's list.
    #[error("the initiator is not in the target's list")]
    Forbidden,
    /// Target serves no host at the moment.
    #[error("the target is suspended")]
    Suspended,
    /// Target unknown, while targets are expected whose names are not known yet.
    #[error("the target is not served yet")]
    Expected,
    /// Initiator is in no target's list, and requests discovery.
    #[error("the initiator is in no target's list")]
    Unlisted,
}

impl Denied {
    fn status(self) -> u16 {
        match self {
            Denied::NotFound => status::NOT_FOUND,
            Denied::Forbidden | Denied::Unlisted => status::FORBIDDEN,
            // Initiators try again after this one, while they take those above for final.
            Denied::Suspended | Denied::Expected => status::UNAVAILABLE,
        }
    }
}

/// Session parameters of a completed login.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedIn {
    /// Initiator name.
    pub initiator: String,
    /// ISID: the initiator's part of the session identifier.
    pub isid: [u8; 6],
    /// Target name; `None` in a discovery session.
    pub target: Option<String>,
    /// [`LoginAccess::target_id`] of the target.
    pub target_id: u64,
    /// Negotiated parameters.
    pub params: Params,
    /// Connection identifier (CID).
    pub cid: u16,
    /// CmdSN of the first command.
    pub cmd_sn: u32,
    /// StatSN of the next response.
    pub stat_sn: u32,
}

/// Action after a response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LoginAction {
    /// Continue with the next request.
    More,
    /// Begin a session, if the limits permit. The response has to be given its TSIH, or be turned into a refusal
    /// ([`refuse`]).
    Session(Box<LoggedIn>),
    /// Close the connection: the login has failed, with the reason for the log.
    Close(String),
}

/// Response and the action that follows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoginStep {
    /// Response header; its data length is set.
    pub response: LoginResponse,
    /// Text of the response.
    pub text: Vec<u8>,
    /// Action after the response.
    pub action: LoginAction,
}

/// Turns a response into a refusal with `status`.
pub fn refuse(response: &mut LoginResponse, status: u16) {
    response.flags &= 0x0c;
    response.status = status.into();
    response.data_len = [0; 3];
    response.tsih = 0.into();
}

/// Login stages (CSG and NSG values).
const SECURITY: u8 = 0;
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;

/// Progress of authentication.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Proof {
    /// Not begun.
    None,
    /// CHAP was selected.
    Chosen,
    /// Challenge was sent.
    Given(Challenge),
    /// Authenticated, or no authentication is required.
    Done,
}

struct Failure(u16, String);

impl<T: Into<String>> From<(u16, T)> for Failure {
    fn from((status, why): (u16, T)) -> Self {
        Failure(status, why.into())
    }
}

/// Login in progress.
#[derive(Debug)]
pub struct Login {
    seed: [u8; SEED_LEN],
    negotiator: Negotiator,
    stage: u8,
    requests: u32,
    first: Option<First>,
    held: Vec<u8>,
    stat_sn: u32,
    proof: Proof,
    access: LoginAccess,
    initiator: Option<String>,
    target: Option<String>,
    discovery: bool,
    /// Initiator, session type and target are known.
    settled: bool,
    /// TargetPortalGroupTag was sent.
    group_said: bool,
}

/// Fields that are constant over all requests of one login.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct First {
    isid: [u8; 6],
    tsih: u16,
    itt: u32,
    cid: u16,
}

impl Login {
    /// Creates the initial state.  `seed` has to be random.
    pub fn new(offer: Offer, seed: [u8; SEED_LEN]) -> Self {
        Self {
            seed,
            negotiator: Negotiator::new(offer),
            stage: SECURITY,
            requests: 0,
            first: None,
            held: Vec::new(),
            stat_sn: 0,
            proof: Proof::None,
            access: LoginAccess::default(),
            initiator: None,
            target: None,
            discovery: false,
            settled: false,
            group_said: false,
        }
    }

    /// Returns the initiator name, once it is known.
    pub fn initiator(&self) -> Option<&str> {
        self.initiator.as_deref()
    }

    /// Returns the name of the requested target, once it is known; `None` for discovery.
    pub fn target(&self) -> Option<&str> {
        self.target.as_deref()
    }

    /// Processes a request and builds the response.
    pub fn request(&mut self, request: &LoginRequest, data: &[u8], directory: &dyn LoginDirectory) -> LoginStep {
        let mut out = Vec::new();
        let current = request.flags >> 2 & 3;
        let result = self.take(request, data, directory, &mut out);
        let (status, mut next, action) = match result {
            Ok(next) => (status::SUCCESS, next, LoginAction::More),
            Err(Failure(status, why)) => {
                out.clear();
                (status, None, LoginAction::Close(why))
            }
        };
        let mut action = action;
        if next == Some(FULL_FEATURE) {
            match self.finish(request) {
                Ok(session) => action = LoginAction::Session(Box::new(session)),
                Err(Failure(status, why)) => return self.failed(request, current, status, why),
            }
        }
        let mut flags = current << 2;
        if let Some(stage) = next.take() {
            flags |= FINAL | stage;
            self.stage = stage;
        }
        let mut response = self.response(request, flags, status);
        response.data_len = wire::data_len(out.len());
        if let LoginAction::Session(session) = &mut action {
            session.stat_sn = self.stat_sn;
        }
        LoginStep { response, text: out, action }
    }

    fn failed(&mut self, request: &LoginRequest, current: u8, status: u16, why: String) -> LoginStep {
        let response = self.response(request, current << 2, status);
        LoginStep { response, text: Vec::new(), action: LoginAction::Close(why) }
    }

    fn response(&mut self, request: &LoginRequest, flags: u8, status: u16) -> LoginResponse {
        let stat_sn = self.stat_sn;
        self.stat_sn = self.stat_sn.wrapping_add(1);
        LoginResponse {
            opcode: response::LOGIN,
            flags,
            version_max: 0,
            version_active: 0,
            ahs_len: 0,
            data_len: [0; 3],
            isid: request.isid,
            tsih: request.tsih,
            itt: request.itt,
            reserved: 0.into(),
            stat_sn: stat_sn.into(),
            exp_cmd_sn: request.cmd_sn,
            max_cmd_sn: request.cmd_sn,
            status: status.into(),
            reserved2: [0; 10],
        }
    }

    /// Processes the text of a request. Returns the next stage if the initiator may advance to it.
    fn take(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        directory: &dyn LoginDirectory,
        out: &mut Vec<u8>,
    ) -> Result<Option<u8>, Failure> {
        let (current, next) = (request.flags >> 2 & 3, request.flags & 3);
        let (transit, continued) = (request.flags & FINAL != 0, request.flags & CONTINUE != 0);
        self.requests += 1;
        if self.requests > REQUESTS_MAX {
            return Err((status::INITIATOR_ERROR, "too many login requests").into());
        }
        let now =
            First { isid: request.isid, tsih: request.tsih.get(), itt: request.itt.get(), cid: request.cid.get() };
        match self.first {
            None => {
                self.stat_sn = request.exp_stat_sn.get();
                if request.version_min != 0 {
                    return Err((
                        status::VERSION,
                        format!("initiator requires protocol version {} or later", request.version_min),
                    )
                        .into());
                }
                if now.tsih != 0 {
                    let (status, why) = match directory.has_session(now.tsih) {
                        true => (status::TOO_MANY_CONNECTIONS, "several connections per session are not supported"),
                        false => (status::NO_SESSION, "no such session"),
                    };
                    return Err((status, why).into());
                }
                if current > OPERATIONAL {
                    return Err((status::INVALID_REQUEST, format!("login begins at stage {current}")).into());
                }
                self.first = Some(now);
                self.stage = current;
            }
            Some(first) if first != now || current != self.stage => {
                return Err((
                    status::INVALID_REQUEST,
                    "login request with other session identifiers than the first one",
                )
                    .into());
            }
            Some(_) => {}
        }
        if transit && (continued || next <= current || next == 2) {
            return Err((status::INVALID_REQUEST, format!("invalid transition from stage {current} to {next}")).into());
        }
        if self.held.len() + data.len() > TEXT_MAX {
            return Err((status::INITIATOR_ERROR, "text is too long").into());
        }
        self.held.extend_from_slice(data);
        if continued {
            return Ok(None);
        }
        let held = mem::take(&mut self.held);
        let pairs = text::parse(&held).map_err(|error| Failure(status::INITIATOR_ERROR, error.to_string()))?;
        self.settle(&pairs, directory)?;
        if !self.group_said && !self.discovery {
            self.group_said = true;
            text::push(out, "TargetPortalGroupTag", &self.access.portal_group.to_string());
        }
        match current {
            SECURITY => self.security(&pairs, out)?,
            _ => {
                if self.proof != Proof::Done {
                    let why = "the initiator continues without authenticating";
                    return Err((status::AUTHENTICATION, why).into());
                }
                self.operational(&pairs, out)?;
            }
        }
        if !transit {
            return Ok(None);
        }
        if self.proof != Proof::Done {
            // Authentication has to complete before the stage changes.
            return match self.proof {
                Proof::Given(_) | Proof::Chosen => Ok(None),
                _ => Err((status::AUTHENTICATION, "initiator did not authenticate").into()),
            };
        }
        Ok(Some(next))
    }

    /// Reads initiator name, session type and target name, which the first request has to carry.
    fn settle(&mut self, pairs: &[Pair<'_>], directory: &dyn LoginDirectory) -> Result<(), Failure> {
        let value = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value);
        if self.settled {
            let again = ["InitiatorName", "TargetName", "SessionType"].into_iter().find(|key| value(key).is_some());
            return match again {
                Some(key) => Err((status::INITIATOR_ERROR, format!("{key} sent after the first login request")).into()),
                None => Ok(()),
            };
        }
        let missing = |key: &str| Failure(status::MISSING_PARAMETER, format!("{key} is missing"));
        let initiator = value("InitiatorName").ok_or_else(|| missing("InitiatorName"))?;
        if !is_name(initiator) {
            return Err((status::INITIATOR_ERROR, "invalid initiator name").into());
        }
        let initiator = initiator.to_ascii_lowercase();
        self.initiator = Some(initiator.clone());
        let access = match value("SessionType").unwrap_or("Normal") {
            "Discovery" => {
                self.discovery = true;
                self.negotiator.set_discovery();
                directory.discovery(&initiator)
            }
            "Normal" => {
                let target = value("TargetName").ok_or_else(|| missing("TargetName"))?.to_ascii_lowercase();
                let access = directory.target(&target, &initiator);
                self.target = Some(target);
                access
            }
            other => return Err((status::SESSION_TYPE, format!("unknown session type {other:.32}")).into()),
        };
        self.access = access.map_err(|denied| Failure(denied.status(), denied.to_string()))?;
        if self.access.chap.is_none() {
            self.proof = Proof::Done;
        }
        self.settled = true;
        Ok(())
    }

    fn security(&mut self, pairs: &[Pair<'_>], out: &mut Vec<u8>) -> Result<(), Failure> {
        let value = |key: &str| pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value);
        for pair in pairs {
            match pair.key {
                "InitiatorName" | "TargetName" | "SessionType" | "InitiatorAlias" => {}
                "AuthMethod" => self.method(pair.value, out)?,
                "CHAP_A" | "CHAP_N" | "CHAP_R" | "CHAP_I" | "CHAP_C" => {}
                _ => self.operational_pair(*pair, out)?,
            }
        }
        if let Some(list) = value("CHAP_A") {
            if self.proof != Proof::Chosen {
                return Err((status::INITIATOR_ERROR, "unexpected CHAP_A").into());
            }
            let Some(algorithm) = Algorithm::choose(list) else {
                return Err((
                    status::AUTHENTICATION,
                    format!("no common CHAP algorithm: initiator offers CHAP_A={list:.32}"),
                )
                    .into());
            };
            let mut bytes = [0; chap::CHALLENGE_LEN];
            bytes.copy_from_slice(&self.seed[1..]);
            let challenge = Challenge { algorithm, id: self.seed[0], bytes };
            text::push(out, "CHAP_A", algorithm.number());
            text::push(out, "CHAP_I", &challenge.id.to_string());
            text::push(out, "CHAP_C", &text::to_hex(&challenge.bytes));
            self.proof = Proof::Given(challenge);
        } else if let (Some(name), Some(response)) = (value("CHAP_N"), value("CHAP_R")) {
            let Proof::Given(challenge) = self.proof else {
                return Err((status::INITIATOR_ERROR, "unexpected CHAP_R").into());
            };
            let mutual = (value("CHAP_I"), value("CHAP_C"));
            self.prove(challenge, name, response, mutual, out)?;
        }
        Ok(())
    }

    fn method(&mut self, list: &str, out: &mut Vec<u8>) -> Result<(), Failure> {
        if self.access.chap.is_none() {
            let none = list.split(',').any(|method| method == "None");
            if !none {
                let why =
                    format!("initiator requires one of {list:.64}, but no CHAP secret is configured for the target");
                return Err((status::AUTHENTICATION, why).into());
            }
            text::push(out, "AuthMethod", "None");
            return Ok(());
        }
        if !list.split(',').any(|method| method == "CHAP") {
            let why = format!("target requires CHAP, initiator offers {list:.64}");
            return Err((status::AUTHENTICATION, why).into());
        }
        if self.proof == Proof::None {
            self.proof = Proof::Chosen;
        }
        text::push(out, "AuthMethod", "CHAP");
        Ok(())
    }

    fn prove(
        &mut self,
        challenge: Challenge,
        name: &str,
        response: &str,
        mutual: (Option<&str>, Option<&str>),
        out: &mut Vec<u8>,
    ) -> Result<(), Failure> {
        let Some(chap) = &self.access.chap else {
            return Err((status::INITIATOR_ERROR, "CHAP response without a challenge").into());
        };
        let response = text::binary(response, 64).unwrap_or_default();
        if !challenge.is_met(&chap.initiator, name, &response) {
            return Err(
                (status::AUTHENTICATION, format!("CHAP failed: wrong user name '{name:.64}' or wrong secret")).into()
            );
        }
        match mutual {
            (None, None) => {}
            (Some(id), Some(theirs)) => {
                let id = text::number(id).and_then(|id| u8::try_from(id).ok());
                let theirs = text::binary(theirs, chap::CHALLENGE_MAX);
                let (Some(id), Some(theirs)) = (id, theirs) else {
                    return Err((status::INITIATOR_ERROR, "invalid CHAP challenge").into());
                };
                let Some(own) = &chap.target else {
                    let why = "the initiator requests mutual CHAP, but the target has no secret for it";
                    return Err((status::AUTHENTICATION, why).into());
                };
                // Reflecting the target's own challenge is an attack: the initiator wants it answered.
                if theirs == challenge.bytes {
                    return Err((status::AUTHENTICATION, "initiator reflects the target's CHAP challenge").into());
                }
                let answer = challenge.algorithm.response(id, &own.secret, &theirs);
                text::push(out, "CHAP_N", &own.name);
                text::push(out, "CHAP_R", &text::to_hex(&answer));
            }
            _ => return Err((status::INITIATOR_ERROR, "CHAP challenge is incomplete").into()),
        }
        self.proof = Proof::Done;
        Ok(())
    }

    fn operational(&mut self, pairs: &[Pair<'_>], out: &mut Vec<u8>) -> Result<(), Failure> {
        for pair in pairs {
            match pair.key {
                "InitiatorName" | "TargetName" | "SessionType" | "InitiatorAlias" => {}
                // AuthMethod was offered in a stage in which none can be selected.
                "AuthMethod" => text::push(out, pair.key, if self.access.chap.is_some() { "Reject" } else { "None" }),
                _ => self.operational_pair(*pair, out)?,
            }
        }
        self.negotiator.declare(out);
        Ok(())
    }

    fn operational_pair(&mut self, pair: Pair<'_>, out: &mut Vec<u8>) -> Result<(), Failure> {
        match self.negotiator.answer(pair, out) {
            Ok(true) => {}
            Ok(false) if pair.key == "TargetAlias" || pair.value == "NotUnderstood" => {}
            Ok(false) => text::push(out, pair.key, "NotUnderstood"),
            Err(bad) => return Err((status::INITIATOR_ERROR, bad.to_string()).into()),
        }
        Ok(())
    }

    fn finish(&mut self, request: &LoginRequest) -> Result<LoggedIn, Failure> {
        if self.negotiator.lacks_digests() {
            return Err((status::INITIATOR_ERROR, "target requires digests").into());
        }
        Ok(LoggedIn {
            initiator: self.initiator.clone().unwrap_or_default(),
            isid: request.isid,
            target: self.target.clone(),
            target_id: self.access.target_id,
            params: self.negotiator.finish(),
            cid: request.cid.get(),
            cmd_sn: request.cmd_sn.get(),
            stat_sn: self.stat_sn,
        })
    }
}

/// Returns true if the form of an iSCSI node name is valid (RFC 7143, section 4.2.7).
pub fn is_name(name: &str) -> bool {
    let form = ["iqn.", "eui.", "naa."].iter().any(|form| {
        name.get(..form.len()).is_some_and(|start| start.eq_ignore_ascii_case(form)) && name.len() > form.len()
    });
    form && name.len() <= wire::NAME_MAX && !name.bytes().any(|byte| byte.is_ascii_control() || byte == b' ')
}

#[cfg(test)]
mod tests;
