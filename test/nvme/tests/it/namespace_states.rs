//! Subsystems whose namespaces each have an ANA state, as gateway groups have them.

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{Digests, blocks, sqe, with};
use forebay_nvmf::session::admin::{NAMESPACES_MAX, SubsystemIdentity};
use forebay_nvmf::wire::log::AnaState;
use forebay_nvmf::{AnaGrouping, Namespace, Subsystem};

const NONE: Digests = Digests { header: false, data: false };
const GROUP: &str = "nqn.2026-11.test:group";

fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    (0..len).rev().fold(0, |value, byte| value << 8 | u64::from(bytes[at + byte]))
}

fn group(site: &Site) -> Subsystem {
    let identity =
        SubsystemIdentity { nqn: GROUP.into(), serial: "1".into(), model: "Model".into(), firmware: "1.0".into() };
    site.subsystems.create_with(identity, 500..=600, AnaGrouping::ByNamespace, |_| {}).expect("a new name")
}

fn add(site: &Site, subsystem: &Subsystem, nsid: u32, model: &std::rc::Rc<Model>) {
    site.shelf.0.borrow_mut().insert(nsid, model.clone());
    let (name, uuid) = (format!("n{nsid}"), [nsid as u8 + 1; 16]);
    subsystem.add_namespace(Namespace { nsid, name, uuid, ana_group: nsid, read_only: false }).expect("in range");
}

#[test]
fn a_state_is_told_and_refuses_commands_of_its_namespace_alone() {
    simulate(4, |_, site| async move {
        let subsystem = group(&site);
        let (first, second) = (Model::new(1 << 20, false), Model::new(1 << 20, false));
        add(&site, &subsystem, 1, &first);
        add(&site, &subsystem, 40, &second);
        subsystem.set_namespace_states([(1, AnaState::Optimized)]);
        let (mut admin, cntlid) = Client::admin(&addr(), NONE, GROUP, HOST).await.expect("an admin queue");
        let mut io = Client::io(&addr(), NONE, GROUP, HOST, cntlid, 1).await.expect("an I/O queue");
        let controller = admin.run(with(sqe(0x06, 0), 10, 1), &[], 4096).await.expect("identify").ok();
        assert_eq!((le(&controller, 344, 4), le(&controller, 348, 4)), (NAMESPACES_MAX.into(), NAMESPACES_MAX.into()));
        admin.run(with(with(sqe(0x09, 0), 10, 0xB), 11, 1 << 11), &[], 0).await.expect("set").ok();
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");

        // The device goes with the state: commands are refused by their path, and hosts still see the namespace.
        subsystem.set_namespace_states([(40, AnaState::Inaccessible)]);
        assert_eq!(admin.finish(request).await.expect("an event").completion.result, 2 | 3 << 8 | 0xC << 16);
        site.shelf.0.borrow_mut().remove(&40);
        subsystem.reopen_namespace(40);
        let refused = io.run(blocks(0x02, 40, 0, 1), &[], 512).await.expect("answered").completion;
        assert_eq!((refused.status, refused.final_), (0x302, false));
        io.run(blocks(0x02, 1, 0, 1), &[], 512).await.expect("read").ok();
        let len = 16 + 2 * (32 + 4);
        let page = with(sqe(0x02, u32::MAX), 10, 0xC | (len as u32 / 4 - 1) << 16);
        let page = admin.run(page, &[], len).await.expect("the ANA page").ok();
        let groups = |at: usize| (le(&page, at, 4), le(&page, at + 16, 1), le(&page, at + 32, 4));
        assert_eq!((le(&page, 8, 2), groups(16), groups(52)), (2, (1, 1, 1), (40, 3, 40)));

        // Another device takes its place, unnoticed.
        let third = Model::new(1 << 20, false);
        site.shelf.0.borrow_mut().insert(40, third.clone());
        subsystem.reopen_namespace(40);
        subsystem.set_namespace_states([(40, AnaState::NonOptimized)]);
        io.run(blocks(0x01, 40, 0, 1), &[7; 512], 0).await.expect("write").ok();
        assert_eq!((second.bytes.borrow()[0], third.bytes.borrow()[0]), (0, 7));

        // A namespace that is gone is not a path's matter.
        subsystem.set_namespace_states([(40, AnaState::Inaccessible)]);
        subsystem.remove_namespace(40);
        let gone = io.run(blocks(0x02, 40, 0, 1), &[], 512).await.expect("answered").completion;
        assert_eq!((gone.status, gone.final_), (0x00B, true));
    });
}
