//! Target port groups: what hosts discover and read of them, and unit attentions for changed access states.

use std::net::SocketAddr;

use crate::common::{HOST, Model, OTHER, Place, TARGET, addr, host, simulate};
use forebay_iscsi::{PortGroups, RemotePortGroup, TargetPort, TargetSpec};
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::client::Client;

/// Sense of a changed asymmetric access state.
const STATE_CHANGED: Option<(u8, u16)> = Some((6, 0x2a06));
/// Sense of changed INQUIRY data.
const INQUIRY_CHANGED: Option<(u8, u16)> = Some((6, 0x3f03));

/// Returns the port of a group; its id differs from the group's number.
fn port(group: u16) -> TargetPort {
    TargetPort { group, relative_id: group + 0x100 }
}

fn remote(group: u16, portals: &[&str]) -> RemotePortGroup {
    let portals = portals.iter().map(|portal| portal.parse::<SocketAddr>().expect("an address")).collect();
    RemotePortGroup { port: port(group), portals }
}

/// Builds groups 2, 5 and 9, of which `own` is the server's.
fn three(own: u16) -> PortGroups {
    let portals = |group: u16| match group {
        2 => vec!["10.0.0.2:3260", "[fd00::2]:3260"],
        5 => vec!["10.0.0.5:3260"],
        _ => vec!["10.0.0.9:3261", "0.0.0.0:3260"],
    };
    let others = [9, 5, 2].into_iter().filter(|group| *group != own);
    PortGroups::new(port(own), others.map(|group| remote(group, &portals(group))).collect()).expect("valid")
}

async fn login(name: &str, session: u8) -> Client {
    Client::login(&addr(), &host(name, session)).await.expect("logs in")
}

/// Logs in, and clears the initial unit attentions of some units.
async fn settled(name: &str, session: u8, luns: &[u16]) -> Client {
    let mut client = login(name, session).await;
    for &lun in luns {
        assert_eq!(told(&mut client, lun).await, Some((6, 0x2900)));
        assert_eq!(told(&mut client, lun).await, None);
    }
    client
}

/// Returns the sense data of TEST UNIT READY.
async fn told(client: &mut Client, lun: u16) -> Option<(u8, u16)> {
    client.run(lun, cdb::test_unit_ready(), &[], 0).await.expect("answers").sense()
}

/// Returns group number, port id, state with preference bit, and supported states of each group.
async fn states(client: &mut Client, lun: u16) -> Vec<(u16, u16, u8, u8)> {
    let bytes = client.run(lun, cdb::report_port_groups(false, 4096), &[], 4096).await.expect("answers").ok();
    assert_eq!(bytes[..4], (bytes.len() as u32 - 4).to_be_bytes());
    let long = client.run(lun, cdb::report_port_groups(true, 4096), &[], 4096).await.expect("answers").ok();
    assert_eq!((&long[..4], &long[4..8]), (&(long.len() as u32 - 4).to_be_bytes()[..], &[0x10, 0, 0, 0][..]));
    assert_eq!(long[8..], bytes[4..]);
    let be16 = |bytes: &[u8]| u16::from_be_bytes([bytes[0], bytes[1]]);
    let groups = bytes[4..].chunks_exact(12);
    groups
        .map(|group| {
            assert_eq!(group[4..8], [0, 2, 0, 1], "altered implicitly, one port");
            (be16(&group[2..]), be16(&group[10..]), group[0], group[1])
        })
        .collect()
}

/// Returns TPGS, relative target port, target port group and target port name from the INQUIRY data.
async fn inquiry(client: &mut Client, lun: u16) -> (u8, u16, u16, String) {
    let standard = client.run(lun, cdb::inquiry(None), &[], 255).await.expect("answers").ok();
    let page = client.run(lun, cdb::inquiry(Some(0x83)), &[], 255).await.expect("answers").ok();
    let (mut found, mut at) = ((standard[5] & 0x30, 0, 0, String::new()), 4);
    while at < page.len() {
        let body = &page[at + 4..at + 4 + usize::from(page[at + 3])];
        match page[at + 1] & 0x3f {
            0x14 => found.1 = u16::from_be_bytes([body[2], body[3]]),
            0x15 => found.2 = u16::from_be_bytes([body[2], body[3]]),
            0x18 => found.3 = String::from_utf8_lossy(body).trim_end_matches('\0').to_owned(),
            _ => {}
        }
        at += 4 + body.len();
    }
    found
}

#[test]
fn a_target_without_port_groups_has_one() {
    simulate(2, |seed, place| async move {
        let unit = place.add(0, &Model::new(1 << 20, seed >= 1));
        place.targets.set_portals(vec![addr()]);
        let mut client = settled(HOST, 1, &[0]).await;
        assert_eq!(client.portal_group, Some(1), "seed {seed}");
        assert_eq!(states(&mut client, 0).await, [(1, 1, 0x80, 1)], "seed {seed}");
        assert_eq!(inquiry(&mut client, 0).await, (0x30, 1, 1, format!("{TARGET},t,0x0001")), "seed {seed}");
        let found = client.discover("").await.expect("answers");
        assert_eq!(found, [(TARGET.to_owned(), vec![format!("{},1", addr())])], "seed {seed}");
        unit.set_preferred_group(Some(7));
        assert_eq!(told(&mut client, 0).await, STATE_CHANGED, "seed {seed}");
        assert_eq!(states(&mut client, 0).await, [(1, 1, 0x80, 1)], "seed {seed}");
    });
}

#[test]
fn hosts_discover_the_portals_of_all_groups() {
    simulate(2, |seed, place| async move {
        place.targets.set_portals(vec![addr(), "10.0.0.1:3260".parse().expect("an address")]);
        place.target.set_port_groups(Some(three(5)));
        let mut expected = vec![format!("{},5", addr())];
        expected
            .extend(["10.0.0.1:3260,5", "10.0.0.2:3260,2", "[fd00::2]:3260,2", "10.0.0.9:3261,9"].map(str::to_owned));
        let mut options = host(HOST, 1);
        options.target.clear();
        let mut discovery = Client::login(&addr(), &options).await.expect("logs in");
        assert_eq!(discovery.portal_group, None, "seed {seed}");
        let found = |portals: &[String]| vec![(TARGET.to_owned(), portals.to_vec())];
        for which in ["All", TARGET] {
            assert_eq!(discovery.discover(which).await.expect("answers"), found(&expected), "seed {seed}: {which}");
        }
        let mut client = login(HOST, 2).await;
        assert_eq!(client.portal_group, Some(5), "seed {seed}");
        assert_eq!(client.discover("").await.expect("answers"), found(&expected), "seed {seed}");

        // A portal of the daemon itself is not listed a second time, for another group.
        place.targets.set_portals(vec!["10.0.0.9:3261".parse().expect("an address")]);
        let portals = ["10.0.0.9:3261,5", "10.0.0.2:3260,2", "[fd00::2]:3260,2"].map(str::to_owned);
        assert_eq!(discovery.discover("All").await.expect("answers"), found(&portals), "seed {seed}");
        place.target.set_port_groups(None);
        assert_eq!(discovery.discover("All").await.expect("answers"), found(&["10.0.0.9:3261,1".to_owned()]));
    });
}

#[test]
fn the_longest_list_of_portals_is_complete() {
    simulate(2, |seed, place| async move {
        let portals = |group: u16| {
            let count = PortGroups::PORTALS_MAX / (PortGroups::GROUPS_MAX - 1);
            let addr =
                |number| SocketAddr::from(([0xfd00, 0x1111, 0x2222, 0x3333, 0x4444, 0x5555, 0x6666, group], number));
            (10_000..).take(count).map(addr).collect::<Vec<_>>()
        };
        let others: Vec<_> = (2..=PortGroups::GROUPS_MAX as u16)
            .map(|group| RemotePortGroup { port: port(group), portals: portals(group) })
            .collect();
        let count: usize = others.iter().map(|group| group.portals.len()).sum();
        place.target.set_port_groups(Some(PortGroups::new(port(1), others).expect("valid")));
        place.add(0, &Model::new(1 << 20, false));
        let mut client = settled(HOST, 1, &[0]).await;
        let found = client.discover("").await.expect("answers");
        assert_eq!(found[0].1.len(), count, "seed {seed}");
        assert_eq!(states(&mut client, 0).await.len(), PortGroups::GROUPS_MAX, "seed {seed}");
        assert_eq!(inquiry(&mut client, 0).await.1, 0x101, "seed {seed}");
    });
}

#[test]
fn states_follow_the_preferred_group_and_are_announced_once() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        let (unit, _other) = (place.add(0, &model), place.add(1, &Model::new(1 << 20, false)));
        place.target.set_port_groups(Some(three(5)));
        let (mut first, mut second) = (settled(HOST, 1, &[0, 1]).await, settled(OTHER, 1, &[0]).await);
        let expect = |optimized: u16| {
            let state = move |group: u16| if group == optimized { 0x80 } else { 0x01 };
            [2, 5, 9].map(|group| (group, group + 0x100, state(group), 0x03))
        };
        assert_eq!(states(&mut first, 0).await, expect(0), "seed {seed}: no group is preferred yet");
        assert_eq!(inquiry(&mut first, 0).await, (0x10, 0x105, 5, format!("{TARGET},t,0x0005")), "seed {seed}");
        for group in [5, 9, 2] {
            unit.set_preferred_group(Some(group));
            // A session that begins after the change has only its first unit attention.
            let mut late = settled(OTHER, 2, &[0]).await;
            for client in [&mut first, &mut second] {
                // INQUIRY is executed despite the unit attention, and leaves it pending.
                assert_eq!(inquiry(client, 0).await.2, 5, "seed {seed}");
                assert_eq!(told(client, 0).await, STATE_CHANGED, "seed {seed}: group {group}");
            }
            // The same state again is no change.
            unit.set_preferred_group(Some(group));
            for client in [&mut first, &mut second, &mut late] {
                assert_eq!(told(client, 0).await, None, "seed {seed}: group {group}, once");
                assert_eq!(states(client, 0).await, expect(group), "seed {seed}");
                // Both states execute commands.
                client.run(0, cdb::write(0, 1), &[group as u8; 512], 0).await.expect("answers").ok();
            }
            assert_eq!(model.at(0), group as u8, "seed {seed}");
            late.logout().await.expect("logs out");
        }
        assert_eq!(told(&mut first, 1).await, None, "seed {seed}: the other unit has not changed");
        // Several changes between two commands are announced together.
        for group in [None, Some(9), Some(3), None] {
            unit.set_preferred_group(group);
        }
        let write = first.run(0, cdb::write(0, 1), &[7; 512], 0).await.expect("answers");
        assert_eq!((write.sense(), model.at(0)), (STATE_CHANGED, 2), "seed {seed}: nothing is written");
        assert_eq!(states(&mut first, 0).await, expect(0), "seed {seed}");
        unit.set_preferred_group(Some(3));
        assert_eq!(told(&mut first, 0).await, STATE_CHANGED, "seed {seed}");
        assert_eq!(states(&mut first, 0).await, expect(0), "seed {seed}: no group has that number");
    });
}

#[test]
fn other_port_groups_are_announced_for_every_unit() {
    simulate(4, |seed, place| async move {
        let luns = [0, 1, 2];
        for lun in luns {
            place.add(lun, &Model::new(1 << 20, seed >= 2)).set_preferred_group(Some(9));
        }
        place.target.set_port_groups(Some(three(5)));
        let mut client = settled(HOST, 1, &luns).await;
        let told_all = async |client: &mut Client, expected: &[Option<(u8, u16)>]| {
            for lun in luns {
                for sense in expected.iter().chain([&None]) {
                    assert_eq!(told(client, lun).await, *sense, "seed {seed}: LUN {lun}");
                }
            }
        };
        // The same groups and portals that have moved concern discovery only.
        place.target.set_port_groups(Some(three(5)));
        let moved = PortGroups::new(port(5), vec![remote(2, &["10.9.9.9:1"]), remote(9, &[])]).expect("valid");
        place.target.set_port_groups(Some(moved));
        told_all(&mut client, &[]).await;
        // A group less.
        let two = PortGroups::new(port(5), vec![remote(2, &[])]).expect("valid");
        place.target.set_port_groups(Some(two));
        told_all(&mut client, &[STATE_CHANGED]).await;
        assert_eq!(states(&mut client, 0).await, [(2, 0x102, 1, 3), (5, 0x105, 1, 3)], "seed {seed}");
        // Another own group.
        place.target.set_port_groups(Some(three(9)));
        told_all(&mut client, &[INQUIRY_CHANGED, STATE_CHANGED]).await;
        assert_eq!(inquiry(&mut client, 2).await, (0x10, 0x109, 9, format!("{TARGET},t,0x0009")), "seed {seed}");
        assert_eq!(states(&mut client, 2).await[2], (9, 0x109, 0x80, 3), "seed {seed}");
        place.target.set_port_groups(None);
        told_all(&mut client, &[INQUIRY_CHANGED, STATE_CHANGED]).await;
        assert_eq!(states(&mut client, 1).await, [(1, 1, 0x80, 1)], "seed {seed}");
        assert_eq!(place.target.session_count(), 1, "seed {seed}: sessions continue");
    });
}

#[test]
fn reports_are_truncated_and_requests_checked() {
    simulate(2, |seed, place| async move {
        let unit = place.add(0, &Model::new(1 << 20, false));
        place.target.set_port_groups(Some(three(5)));
        unit.set_preferred_group(Some(9));
        let mut client = settled(HOST, 1, &[0]).await;
        let all = client.run(0, cdb::report_port_groups(false, 4096), &[], 4096).await.expect("answers").ok();
        assert_eq!((all.len(), &all[..4]), (40, &[0, 0, 0, 36][..]), "seed {seed}");
        for len in [0, 4, 10, 39] {
            let report = cdb::report_port_groups(false, len);
            let found = client.run(0, report, &[], len as usize).await.expect("answers").ok();
            assert_eq!(found, all[..len as usize], "seed {seed}: {len} bytes");
        }
        let request = |states: [(u8, u8); 3]| {
            let mut list = vec![0; 4];
            states.iter().for_each(|&(group, state)| list.extend([state, 0, 0, group]));
            list
        };
        let ok = request([(2, 1), (9, 0), (5, 1)]);
        client.run(0, cdb::set_port_groups(16), &ok, 0).await.expect("answers").ok();
        for list in [request([(2, 1), (9, 0), (5, 0)]), request([(2, 1), (9, 0), (6, 1)]), request([(9, 2); 3])] {
            let done = client.run(0, cdb::set_port_groups(16), &list, 0).await.expect("answers");
            assert_eq!(done.sense(), Some((5, 0x2600)), "seed {seed}: {list:?}");
        }
        assert_eq!(told(&mut client, 0).await, None, "seed {seed}: nothing has changed");
        assert_eq!(states(&mut client, 0).await[2], (9, 0x109, 0x80, 3), "seed {seed}");
    });
}

#[test]
fn a_target_is_created_with_its_port_groups() {
    simulate(2, |seed, place: Place| async move {
        let name = "iqn.2026-11.io.forebay:group";
        let spec = TargetSpec { name: name.into(), port_groups: Some(three(2)), ..TargetSpec::default() };
        let target = place.targets.create(spec).expect("another name");
        assert_eq!(target.own_port(), port(2), "seed {seed}");
        place.add_to(&target, 0, &Model::new(1 << 20, false), &[]);
        let mut options = host(HOST, 1);
        options.target = name.into();
        let mut client = Client::login(&addr(), &options).await.expect("logs in");
        assert_eq!(client.portal_group, Some(2), "seed {seed}");
        assert_eq!(told(&mut client, 0).await, Some((6, 0x2900)), "seed {seed}");
        assert_eq!(inquiry(&mut client, 0).await, (0x10, 0x102, 2, format!("{name},t,0x0002")), "seed {seed}");
        // The other target has one group.
        assert_eq!(login(HOST, 1).await.portal_group, Some(1), "seed {seed}");
    });
}
