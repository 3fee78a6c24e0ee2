use std::collections::BTreeSet;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn id(number: u8) -> MemberId {
    MemberId([number; 16])
}

/// Versions of a program that knows one more than this one.
const BOTH: GroupVersions = GroupVersions { oldest: 1, newest: 2 };

fn start(number: u8) -> StartId {
    StartId([number; 16])
}

fn entry(slot: u16, number: u8) -> GatewayMember {
    GatewayMember {
        slot,
        host: format!("gateway{slot}"),
        version: "0.1.0".into(),
        versions: GroupVersions { oldest: 1, newest: 2 },
        clients: vec![format!("10.0.0.{slot}:0/{number}")],
        peer_addrs: vec![format!("tcp:10.0.0.{slot}:7000")],
        ..GatewayMember::new(start(number))
    }
}

fn group() -> GroupRecord {
    let identity = GroupIdentity::new(GatewayGroupId([9; 16]), GroupPolicy::default(), Value::Null);
    let mut record = GroupRecord::created(identity, 1);
    for number in 1..=3 {
        record.apply(&[GroupChange::Join { member: id(number), entry: entry(number.into(), number) }]).unwrap();
    }
    record
}

fn with_volume(owner: u8) -> (GroupRecord, VolumeName) {
    let (mut record, name) = (group(), VolumeName::new("rbd/a"));
    let add = GroupChange::AddVolume { volume: name.clone(), owner: id(owner), settings: Value::Null };
    record.apply(&[add]).unwrap();
    (record, name)
}

fn begin(member: u8, by: u8) -> GroupChange {
    GroupChange::BeginFencing { member: id(member), start: start(member), by: id(by) }
}

fn fenced(member: u8, by: u8) -> GroupChange {
    GroupChange::Fenced { member: id(member), start: start(member), by: id(by) }
}

fn assign(volume: &VolumeName, to: u8) -> GroupChange {
    GroupChange::Assign { volume: volume.clone(), to: id(to) }
}

#[test]
fn a_failed_members_volumes_are_assigned_once_it_is_fenced() {
    let (mut record, name) = with_volume(1);
    assert_eq!(record.apply(&[assign(&name, 2)]), Err(ChangeRefusal::OwnerServes));
    record.apply(&[begin(1, 2)]).unwrap();
    assert_eq!(record.apply(&[assign(&name, 2)]), Err(ChangeRefusal::OwnerServes), "not fenced yet");
    assert_eq!(record.apply(&[begin(1, 3)]), Err(ChangeRefusal::FencedByAnother));
    assert_eq!(record.apply(&[fenced(1, 3)]), Err(ChangeRefusal::FencedByAnother));
    let epoch = record.epoch();
    record.apply(&[fenced(1, 2), assign(&name, 3)]).unwrap();
    assert_eq!(record.epoch(), epoch + 1, "one step");
    assert_eq!(record.volume(&name).unwrap().owner, VolumeOwner { member: id(3), term: epoch + 1, next: None });
    assert_eq!(record.owned_by(id(3)).collect::<Vec<_>>(), [&name]);
    assert_eq!(record.owned_count(id(1)), 0);
}

#[test]
fn fencing_goes_on_when_the_member_that_fences_fails_too() {
    let mut record = group();
    record.apply(&[begin(1, 2)]).unwrap();
    record.apply(&[begin(2, 3)]).unwrap();
    record.apply(&[begin(1, 3)]).unwrap();
    assert_eq!(record.apply(&[fenced(1, 2)]), Err(ChangeRefusal::FencedByAnother));
    record.apply(&[fenced(1, 3), fenced(2, 3)]).unwrap();
    assert_eq!(record.active().collect::<Vec<_>>(), [id(3)]);
}

#[test]
fn a_member_rejoins_with_another_start_only() {
    let mut record = group();
    let join = |slot, number| GroupChange::Join { member: id(1), entry: entry(slot, number) };
    assert_eq!(record.apply(&[join(1, 7)]), Err(ChangeRefusal::NotFenced));
    record.apply(&[begin(1, 2)]).unwrap();
    assert_eq!(record.apply(&[join(1, 7)]), Err(ChangeRefusal::NotFenced));
    record.apply(&[fenced(1, 2)]).unwrap();
    assert_eq!(record.apply(&[join(1, 1)]), Err(ChangeRefusal::MemberState), "the start that was fenced");
    assert_eq!(record.apply(&[join(5, 7)]), Err(ChangeRefusal::Slot));
    record.apply(&[join(1, 7)]).unwrap();
    assert!(record.serves(id(1), start(7)) && !record.serves(id(1), start(1)));
    // What was observed of the former start is no reason to fence this one.
    assert_eq!(record.apply(&[begin(1, 2)]), Err(ChangeRefusal::MemberState));
}

#[test]
fn a_weight_stays_with_a_member_that_rejoins() {
    let mut record = group();
    record.apply(&[GroupChange::SetWeight { member: id(1), weight: 0 }]).unwrap();
    record.apply(&[begin(1, 2), fenced(1, 2)]).unwrap();
    record.apply(&[GroupChange::Join { member: id(1), entry: entry(1, 7) }]).unwrap();
    assert_eq!(record.member(id(1)).unwrap().weight, 0);
    let too_high = GroupChange::SetWeight { member: id(1), weight: WEIGHT_MAX + 1 };
    assert_eq!(record.apply(&[too_high]), Err(ChangeRefusal::Weight));
    let unknown = GroupChange::SetWeight { member: id(9), weight: 1 };
    assert_eq!(record.apply(&[unknown]), Err(ChangeRefusal::NoMember));
}

#[test]
fn a_policy_is_changed_within_its_bounds() {
    let mut record = group();
    let policy = GroupPolicy { rebalance: true, ..record.policy() };
    record.apply(&[GroupChange::SetPolicy(policy)]).unwrap();
    assert!(record.policy().rebalance);
    let short = GroupPolicy { lease_ms: 1, rebalance: false };
    assert_eq!(record.apply(&[GroupChange::SetPolicy(short)]), Err(ChangeRefusal::Policy));
    assert_eq!(record.policy(), policy);
    record.apply(&[GroupChange::SetSettings(json!({"nqn": "nqn.y"}))]).unwrap();
    assert_eq!((record.identity().settings["nqn"].as_str(), record.policy()), (Some("nqn.y"), policy));
    let with_another = [GroupChange::SetSettings(Value::Null), GroupChange::SetPolicy(short)];
    assert_eq!(record.apply(&with_another), Err(ChangeRefusal::Policy));
    assert_eq!(record.identity().settings["nqn"].as_str(), Some("nqn.y"), "all or none");
}

#[test]
fn a_volume_is_handed_over_by_its_owner_in_its_term() {
    let (mut record, name) = with_volume(1);
    let term = record.volume(&name).unwrap().owner.term;
    let hand_over = |from: u8, term| GroupChange::HandOver {
        volume: name.clone(),
        from: id(from),
        start: start(from),
        term,
        to: id(2),
    };
    record.apply(&[GroupChange::ProposeMove { volume: name.clone(), to: id(2) }]).unwrap();
    assert_eq!(record.coming_to(id(2)).collect::<Vec<_>>(), [&name]);
    assert_eq!(record.apply(&[hand_over(3, term)]), Err(ChangeRefusal::NotOwner));
    assert_eq!(record.apply(&[hand_over(1, term + 1)]), Err(ChangeRefusal::NotOwner));
    record.apply(&[hand_over(1, term)]).unwrap();
    assert_eq!(record.coming_to(id(2)).count(), 0);
    assert_eq!(record.apply(&[hand_over(1, term)]), Err(ChangeRefusal::NotOwner), "again");
    assert!(record.volume(&name).unwrap().owner.term > term);
}

#[test]
fn a_volume_that_is_opened_again_is_not_handed_over_any_more() {
    let (mut record, name) = with_volume(1);
    let term = record.volume(&name).unwrap().owner.term;
    let reopen = GroupChange::Reopen { volume: name.clone(), by: id(1), start: start(1), term };
    record.apply(std::slice::from_ref(&reopen)).unwrap();
    let late = GroupChange::HandOver { volume: name.clone(), from: id(1), start: start(1), term, to: id(2) };
    assert_eq!(record.apply(&[late]), Err(ChangeRefusal::NotOwner));
    assert_eq!(record.apply(&[reopen]), Err(ChangeRefusal::NotOwner), "again");
}

#[test]
fn a_log_goes_where_its_copies_are() {
    let (mut record, name) = with_volume(1);
    let copies = Some(BTreeSet::from([id(1), id(2)]));
    record.apply(&[GroupChange::SetCopies { volume: name.clone(), owner: id(1), copies }]).unwrap();
    let to = |number| GroupChange::ProposeMove { volume: name.clone(), to: id(number) };
    assert_eq!(record.apply(&[to(3)]), Err(ChangeRefusal::NoCopy));
    assert_eq!(record.apply(&[begin(1, 2), fenced(1, 2), assign(&name, 3)]), Err(ChangeRefusal::NoCopy));
    assert!(record.member(id(1)).unwrap().state.serves(), "nothing of it was done");
    record.apply(&[begin(1, 2), fenced(1, 2), assign(&name, 2)]).unwrap();
}

#[test]
fn slots_rest_after_their_member_has_left() {
    let mut record = group();
    record.apply(&[GroupChange::Leave { member: id(1), now: 1000 }]).unwrap();
    assert_eq!(record.free_slot(1000), Some(0));
    record.apply(&[GroupChange::Join { member: id(8), entry: entry(0, 8) }]).unwrap();
    assert_eq!(record.free_slot(2000), Some(4), "slot 1 rests");
    assert_eq!(record.free_slot(1000 + 24 * 3600), Some(1));
    let taken = GroupChange::Join { member: id(7), entry: entry(2, 7) };
    assert_eq!(record.apply(&[taken]), Err(ChangeRefusal::Slot));
}

#[test]
fn members_that_own_volumes_stay() {
    let (mut record, name) = with_volume(1);
    let leave = GroupChange::Leave { member: id(1), now: 0 };
    assert_eq!(record.apply(std::slice::from_ref(&leave)), Err(ChangeRefusal::OwnsVolumes));
    record.apply(&[GroupChange::RemoveVolume { volume: name.clone() }]).unwrap();
    let forget = |by: u8| GroupChange::ForgetVolume { volume: name.clone(), by: id(by), start: start(by) };
    assert_eq!(record.apply(&[forget(2)]), Err(ChangeRefusal::NotOwner), "its owner may have it open");
    record.apply(&[forget(1), leave]).unwrap();
    assert_eq!(record.member(id(1)), None);
}

#[test]
fn a_golden_record_is_read() {
    let pairs = [
        (
            "group",
            r#"{"version":1,"epoch":7,"id":"00112233445566778899aabbccddeeff","policy":{"lease_ms":1000,"rebalance":false},"settings":{"nqn":"nqn.x"},"left":{"3":5}}"#,
        ),
        (
            "member.000102030405060708090a0b0c0d0e0f",
            r#"{"slot":2,"host":"g2","version":"0.1.0","versions":[1,1],"state":"fencing","by":"ffffffffffffffffffffffffffffffff","start":"0f0e0d0c0b0a09080706050403020100","clients":["10.0.0.2:0/17"],"peer_addrs":["tcp:10.0.0.2:7000"],"weight":100,"settings":{}}"#,
        ),
        (
            "volume.rbd/ns/disk",
            r#"{"owner":{"member":"000102030405060708090a0b0c0d0e0f","term":5},"copies":["000102030405060708090a0b0c0d0e0f"],"settings":{"exports":[]}}"#,
        ),
    ];
    let record = GroupRecord::decode(pairs.map(|(key, value)| (key.into(), value.into())), GroupVersions::OWN).unwrap();
    assert_eq!((record.epoch(), record.version()), (7, 1));
    let (member, entry) = record.members().first_key_value().unwrap();
    assert_eq!(entry.state, GatewayState::Fencing(MemberId([0xff; 16])));
    assert_eq!(record.owned_by(*member).map(VolumeName::as_str).collect::<Vec<_>>(), ["rbd/ns/disk"]);
    for (key, value) in record.encode_keys(&record.all_keys()) {
        let stored = pairs.iter().find(|(other, _)| other.as_bytes() == key).unwrap().1;
        let is: Value = serde_json::from_slice(&value.unwrap()).unwrap();
        assert_eq!(is, serde_json::from_str::<Value>(stored).unwrap());
    }
}

#[test]
fn later_formats_are_refused_by_name() {
    let decode = |value: &str| GroupRecord::decode([(GROUP_KEY.to_vec(), value.into())], GroupVersions::OWN);
    assert_eq!(decode(r#"{"version":2}"#), Err(MalformedGroup::Version { version: 2, works_with: GroupVersions::OWN }));
    let with = r#"{"version":1,"features":["shards"],"epoch":7,"id":"00112233445566778899aabbccddeeff","policy":{"lease_ms":1000}}"#;
    assert_eq!(decode(with), Err(MalformedGroup::Features("shards".into())));
    assert_eq!(GroupRecord::decode([], GroupVersions::OWN), Err(MalformedGroup::None));
}

#[test]
fn an_entry_without_versions_is_of_the_first() {
    let entry: GatewayMember = serde_json::from_str(
        r#"{"slot":2,"host":"g2","version":"0.1.0","state":"active","start":"0f0e0d0c0b0a09080706050403020100","clients":[],"peer_addrs":[],"weight":100}"#,
    )
    .unwrap();
    assert_eq!(entry.versions, GroupVersions { oldest: 1, newest: 1 });
    assert!(entry.later.is_empty());
}

#[test]
fn fields_of_later_versions_are_kept() {
    let pairs = [
        (
            "group",
            r#"{"version":1,"epoch":7,"id":"00112233445566778899aabbccddeeff","policy":{"lease_ms":1000,"rebalance":false},"settings":null,"zone":"a"}"#,
        ),
        (
            "member.000102030405060708090a0b0c0d0e0f",
            r#"{"slot":2,"host":"g2","version":"9.1.0","versions":[1,3],"state":"active","start":"0f0e0d0c0b0a09080706050403020100","clients":[],"peer_addrs":[],"weight":100,"settings":null,"rack":{"row":7}}"#,
        ),
        (
            "volume.rbd/disk",
            r#"{"owner":{"member":"000102030405060708090a0b0c0d0e0f","term":5},"settings":null,"tier":"fast"}"#,
        ),
    ];
    let mut record =
        GroupRecord::decode(pairs.map(|(key, value)| (key.into(), value.into())), GroupVersions::OWN).unwrap();
    let member = *record.members().first_key_value().unwrap().0;
    let keys = record
        .apply(&[
            GroupChange::Drain { member, drain: true },
            GroupChange::SetVolume { volume: VolumeName::new("rbd/disk"), settings: Value::from(1) },
        ])
        .unwrap();
    let written: Vec<Value> = record
        .encode_keys(&keys)
        .into_iter()
        .map(|(_, value)| serde_json::from_slice(&value.unwrap()).unwrap())
        .collect();
    assert_eq!((&written[0]["zone"], &written[0]["epoch"]), (&Value::from("a"), &Value::from(8)));
    assert_eq!((&written[1]["rack"]["row"], &written[1]["state"]), (&Value::from(7), &Value::from("draining")));
    assert_eq!((&written[2]["tier"], &written[2]["settings"]), (&Value::from("fast"), &Value::from(1)));
}

#[test]
fn the_version_is_raised_when_every_member_works_with_the_next_one() {
    let mut record = group();
    let versions = |oldest, newest| GroupVersions { oldest, newest };
    let join = |number: u8, versions| {
        let entry = GatewayMember { versions, ..entry(number.into(), number) };
        GroupChange::Join { member: id(number), entry }
    };
    record.apply(&[join(4, versions(1, 1))]).unwrap();
    assert_eq!(record.next_version(), None, "one member works with the first version only");
    assert_eq!(record.apply(&[GroupChange::RaiseVersion(2)]), Err(ChangeRefusal::Version));
    assert_eq!(record.apply(&[join(5, versions(2, 3))]), Err(ChangeRefusal::Version), "two versions apart");
    record.apply(&[GroupChange::Leave { member: id(4), now: 0 }]).unwrap();
    assert_eq!(record.apply(&[GroupChange::RaiseVersion(3)]), Err(ChangeRefusal::Version), "one at a time");
    let mut follower = record.clone();
    let keys = record.apply(&[GroupChange::RaiseVersion(2)]).unwrap();
    assert_eq!(record.version(), 2);
    let stored = record.encode_keys(&keys);
    assert_eq!(follower.clone().follow(&stored, BOTH), Ok(true));
    let refused = MalformedGroup::Version { version: 2, works_with: GroupVersions::OWN };
    assert_eq!(refused.to_string(), "the record of the gateway group has version 2; this program works with version 1");
    assert_eq!(follower.follow(&stored, GroupVersions::OWN), Err(refused));
    assert_eq!(record.apply(&[join(6, versions(1, 1))]), Err(ChangeRefusal::Version));
    record.apply(&[join(6, versions(2, 3))]).unwrap();
    let before = record.clone();
    let refused = record.apply(&[GroupChange::Drain { member: id(1), drain: true }, GroupChange::RaiseVersion(3)]);
    assert_eq!((refused, &record), (Err(ChangeRefusal::Version), &before));
}

/// Change by numbers, for programs of changes.
fn drawn((kind, member, other, volume): (u8, u8, u8, u8), record: &GroupRecord) -> GroupChange {
    let name = VolumeName::new(format!("rbd/v{volume}"));
    let (member, other) = (id(1 + member), id(1 + other));
    let current = record.member(member);
    let start_now = current.map_or(start(1), |entry| entry.start);
    match kind {
        0 => {
            let slot = current.map_or_else(|| record.free_slot(0).unwrap(), |entry| entry.slot);
            let number = record.epoch() as u8;
            GroupChange::Join { member, entry: GatewayMember { slot, ..entry(slot, number) } }
        }
        1 => GroupChange::Leave { member, now: 0 },
        2 => GroupChange::Drain { member, drain: volume % 2 == 0 },
        3 => GroupChange::BeginFencing { member, start: start_now, by: other },
        4 => GroupChange::Fenced { member, start: start_now, by: other },
        5 => GroupChange::AddVolume { volume: name, owner: member, settings: Value::Null },
        6 if other.0[0] % 2 == 0 => GroupChange::RemoveVolume { volume: name },
        6 => GroupChange::ForgetVolume { volume: name, by: member, start: start_now },
        7 => GroupChange::Assign { volume: name, to: member },
        8 => GroupChange::ProposeMove { volume: name, to: member },
        9 if other.0[0] % 2 == 0 => GroupChange::CancelMove { volume: name },
        9 => {
            let term = record.volume(&name).map_or(0, |entry| entry.owner.term);
            GroupChange::Reopen { volume: name, by: member, start: start_now, term }
        }
        10 => {
            let term = record.volume(&name).map_or(0, |entry| entry.owner.term);
            GroupChange::HandOver { volume: name, from: member, start: start_now, term, to: other }
        }
        11 => GroupChange::SetWeight { member, weight: u32::from(volume) * 50 },
        12 => GroupChange::SetPolicy(GroupPolicy { rebalance: volume % 2 == 0, ..record.policy() }),
        13 if volume % 2 == 0 => GroupChange::SetSettings(json!({ "volume": volume })),
        13 => GroupChange::RaiseVersion(record.version() + 1),
        _ => {
            let copies = (volume % 3 > 0).then(|| BTreeSet::from([member, other]));
            GroupChange::SetCopies { volume: name, owner: member, copies }
        }
    }
}

proptest! {
    /// Any program of changes leaves a record that is read as it was written, and that others follow.
    #[test]
    fn records_are_followed_and_read_as_they_were_written(
        program in prop::collection::vec(prop::collection::vec((0..15_u8, 0..5_u8, 0..5_u8, 0..6_u8), 1..4), 1..60),
    ) {
        let mut record = group();
        let mut follower = record.clone();
        for step in program {
            let before = record.clone();
            let changes: Vec<_> = step.into_iter().map(|numbers| drawn(numbers, &record)).collect();
            match record.apply(&changes) {
                Ok(keys) => {
                    prop_assert_eq!(record.epoch(), before.epoch() + 1);
                    let stored = record.encode_keys(&keys);
                    prop_assert_eq!(follower.follow(&stored, BOTH), Ok(true));
                    prop_assert_eq!(follower.follow(&stored, BOTH), Ok(false));
                    // G3: an owner that serves loses a volume by handing it over only.
                    for (name, volume) in before.volumes() {
                        let owner = volume.owner.member;
                        let Some(after) = record.volume(name).filter(|after| after.owner.member != owner) else { continue };
                        let out = |record: &GroupRecord| matches!(record.member(owner).map(|m| m.state), Some(GatewayState::Out(_)) | None);
                        let given = changes.iter().any(|change| matches!(change, GroupChange::HandOver { volume, from, .. } if volume == name && *from == owner));
                        let replaced = changes.iter().any(|change| matches!(change, GroupChange::ForgetVolume { volume, by, .. } if volume == name && *by == owner));
                        prop_assert!(out(&before) || out(&record) || given || replaced, "{:?} to {:?}", volume, after);
                    }
                }
                Err(_) => prop_assert_eq!(&record, &before),
            }
            prop_assert_eq!(&follower, &record);
            prop_assert_eq!((&follower.owned, &follower.coming), (&record.owned, &record.coming));
            let all = record.encode_keys(&record.all_keys()).into_iter().map(|(key, value)| (key, value.unwrap()));
            let read = GroupRecord::decode(all, BOTH).expect("a record");
            prop_assert_eq!(&read, &record);
            prop_assert_eq!((&read.owned, &read.coming), (&record.owned, &record.coming));
        }
    }

    #[test]
    fn any_bytes_are_a_record_or_malformed(
        pairs in prop::collection::vec(("(group|member\\.[0-9a-f]{0,33}|volume\\..{0,5}|.{0,4})", prop::collection::vec(any::<u8>(), 0..40)), 0..6),
    ) {
        let _ = GroupRecord::decode(pairs.into_iter().map(|(key, value)| (key.into_bytes(), value)), BOTH);
    }
}
