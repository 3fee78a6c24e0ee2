//! Unit tests.

use super::*;
use crate::session::chap::Credential;

const INITIATOR: &str = "iqn.2000-01.org.host:one";

struct Place {
    chap: Option<Chap>,
}

impl LoginDirectory for Place {
    fn target(&self, target: &str, initiator: &str) -> Result<LoginAccess, Denied> {
        match target {
            "iqn.t" if initiator == INITIATOR => {
                Ok(LoginAccess { target_id: 1, portal_group: 3, chap: self.chap.clone() })
            }
            "iqn.t" => Err(Denied::Forbidden),
            _ => Err(Denied::NotFound),
        }
    }

    fn discovery(&self, _initiator: &str) -> Result<LoginAccess, Denied> {
        Ok(LoginAccess { target_id: 1, portal_group: 3, chap: self.chap.clone() })
    }

    fn has_session(&self, tsih: u16) -> bool {
        tsih == 9
    }
}

fn request(flags: u8) -> LoginRequest {
    LoginRequest {
        opcode: 0x43,
        flags,
        version_max: 0,
        version_min: 0,
        ahs_len: 0,
        data_len: [0; 3],
        isid: [0x80, 1, 2, 3, 4, 5],
        tsih: 0.into(),
        itt: 7.into(),
        cid: 1.into(),
        reserved: 0.into(),
        cmd_sn: 5.into(),
        exp_stat_sn: 100.into(),
        reserved2: [0; 16],
    }
}

fn said(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    pairs.iter().for_each(|(key, value)| text::push(&mut out, key, value));
    out
}

fn login() -> Login {
    Login::new(Offer::default(), [5; SEED_LEN])
}

fn value<'a>(step: &'a LoginStep, key: &str) -> &'a str {
    let pairs = text::parse(&step.text).expect("a text");
    pairs.iter().find(|pair| pair.key == key).unwrap_or_else(|| panic!("no {key}")).value
}

const NAMES: [(&str, &str); 2] = [("InitiatorName", INITIATOR), ("TargetName", "iqn.t")];

#[test]
fn one_request_is_enough_where_nobody_asks_who_it_is() {
    let step = login().request(&request(0x80 | 1 << 2 | 3), &said(&NAMES), &Place { chap: None });
    assert_eq!((step.response.status.get(), step.response.flags), (0, 0x87));
    assert_eq!(step.response.stat_sn.get(), 100);
    assert_eq!(value(&step, "TargetPortalGroupTag"), "3");
    let LoginAction::Session(session) = &step.action else { panic!("{:?}", step.action) };
    assert_eq!((session.stat_sn, session.cmd_sn), (101, 5));
    assert_eq!(session.target.as_deref(), Some("iqn.t"));
}

fn chap() -> Chap {
    let credential = |name: &str, secret: &str| Credential { name: name.into(), secret: secret.as_bytes().to_vec() };
    Chap { initiator: credential("host", "a long secret"), target: Some(credential("disk", "another secret")) }
}

fn to_the_challenge(login: &mut Login, place: &Place) -> (u8, Vec<u8>) {
    let mut pairs = NAMES.to_vec();
    pairs.push(("AuthMethod", "CHAP,None"));
    let step = login.request(&request(0x81), &said(&pairs), place);
    assert_eq!((step.response.flags, value(&step, "AuthMethod")), (0, "CHAP"));
    let step = login.request(&request(0), &said(&[("CHAP_A", "7,5")]), place);
    assert_eq!(value(&step, "CHAP_A"), "7");
    let id = value(&step, "CHAP_I").parse().expect("a number");
    (id, text::binary(value(&step, "CHAP_C"), 64).expect("bytes"))
}

#[test]
fn chap_is_proven_both_ways() {
    let place = Place { chap: Some(chap()) };
    let mut login = login();
    let (id, challenge) = to_the_challenge(&mut login, &place);
    let response = text::to_hex(&Algorithm::Sha256.response(id, b"a long secret", &challenge));
    let answer =
        said(&[("CHAP_N", "host"), ("CHAP_R", &response), ("CHAP_I", "9"), ("CHAP_C", "0x000102030405060708")]);
    let step = login.request(&request(0x81), &answer, &place);
    assert_eq!((step.response.flags, value(&step, "CHAP_N")), (0x81, "disk"));
    let right = Algorithm::Sha256.response(9, b"another secret", &[0, 1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(value(&step, "CHAP_R"), text::to_hex(&right));
    let step = login.request(&request(0x80 | 1 << 2 | 3), &[], &place);
    assert!(matches!(step.action, LoginAction::Session(_)));
}

#[test]
fn who_does_not_prove_is_refused() {
    let place = Place { chap: Some(chap()) };
    let refused = |step: LoginStep| match step.action {
        LoginAction::Close(_) => step.response.status.get(),
        other => panic!("{other:?}"),
    };
    let straight = login().request(&request(0x80 | 1 << 2 | 3), &said(&NAMES), &place);
    assert_eq!(refused(straight), status::AUTHENTICATION);
    assert_eq!(refused(login().request(&request(0x83), &said(&NAMES), &place)), status::AUTHENTICATION);
    let mut wrong = login();
    let (id, challenge) = to_the_challenge(&mut wrong, &place);
    let response = text::to_hex(&Algorithm::Sha256.response(id, b"a wrong secret", &challenge));
    let step = wrong.request(&request(0x81), &said(&[("CHAP_N", "host"), ("CHAP_R", &response)]), &place);
    assert_eq!(refused(step), status::AUTHENTICATION);
    let mut mirror = login();
    let (id, challenge) = to_the_challenge(&mut mirror, &place);
    let response = text::to_hex(&Algorithm::Sha256.response(id, b"a long secret", &challenge));
    let reflected = text::to_hex(&challenge);
    let answer = [("CHAP_N", "host"), ("CHAP_R", &*response), ("CHAP_I", "1"), ("CHAP_C", &*reflected)];
    assert_eq!(refused(mirror.request(&request(0x81), &said(&answer), &place)), status::AUTHENTICATION);
}

#[test]
fn what_is_wrong_has_its_status() {
    let place = Place { chap: None };
    let full = 0x80 | 1 << 2 | 3;
    let status = |request: LoginRequest, pairs: &[(&str, &str)]| {
        login().request(&request, &said(pairs), &place).response.status.get()
    };
    assert_eq!(status(request(full), &NAMES[..1]), status::MISSING_PARAMETER);
    assert_eq!(status(request(full), &NAMES[1..]), status::MISSING_PARAMETER);
    assert_eq!(status(request(full), &[NAMES[0], ("TargetName", "iqn.x")]), status::NOT_FOUND);
    assert_eq!(status(request(full), &[("InitiatorName", "iqn.other"), NAMES[1]]), status::FORBIDDEN);
    assert_eq!(status(request(full), &[NAMES[0], ("SessionType", "Odd")]), status::SESSION_TYPE);
    assert_eq!(status(request(full), &[NAMES[0], NAMES[1], ("MaxBurstLength", "1")]), status::INITIATOR_ERROR);
    assert_eq!(status(LoginRequest { version_min: 1, ..request(full) }, &NAMES), status::VERSION);
    assert_eq!(status(LoginRequest { tsih: 9.into(), ..request(full) }, &NAMES), status::TOO_MANY_CONNECTIONS);
    assert_eq!(status(LoginRequest { tsih: 8.into(), ..request(full) }, &NAMES), status::NO_SESSION);
    assert_eq!(status(request(0x80 | 1 << 2 | 2), &NAMES), status::INVALID_REQUEST);
    assert_eq!(status(request(3 << 2), &NAMES), status::INVALID_REQUEST);
}

#[test]
fn a_text_may_come_in_parts() {
    let place = Place { chap: None };
    let mut login = login();
    let text = said(&[NAMES[0], ("SessionType", "Discovery"), ("MaxConnections", "4")]);
    let (front, back) = text.split_at(20);
    let step = login.request(&request(0x40 | 1 << 2), front, &place);
    assert_eq!((step.response.flags, step.text.len()), (1 << 2, 0));
    let step = login.request(&request(0x80 | 1 << 2 | 3), back, &place);
    assert_eq!(value(&step, "MaxConnections"), "Irrelevant");
    let LoginAction::Session(session) = step.action else { panic!("no session") };
    assert_eq!((session.target, session.stat_sn), (None, 102));
}

#[test]
fn names_have_a_form() {
    assert!(is_name("iqn.2000-01.org:x") && is_name("eui.0123") && is_name("naa.5"));
    assert!(!is_name("iqn.") && !is_name("host") && !is_name("iqn.a b") && !is_name("") && !is_name("ïqn.a"));
}
