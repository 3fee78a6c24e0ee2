//! Unit attentions, and events of sessions that watch.

use std::sync::Arc;

use forebay_load::model::Model;
use forebay_scsi::ScsiUnitEvent::{Added, Changed, Missed, Removed};
use forebay_scsi::mode::Modes;

use crate::common::simulate;

#[test]
fn a_new_capacity_is_a_unit_attention_and_an_event() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(2, &model);
        let (mut host, mut idle) = (disks.host("a"), disks.host("b"));
        host.settle(2, &[0; 6], &[]).await.ok();
        assert_eq!(host.events(), []);
        model.resize(2 << 20);
        assert_eq!(host.event().await, Changed { lun: 2, code: 0x2a09 });
        assert_eq!(host.events(), [], "once");
        assert_eq!(host.told(2).await, Some((6, 0x2a09)));
        assert_eq!(host.told(2).await, None);
        assert_eq!(idle.events(), [], "a host that does not use the unit reads its capacity when it does");
        // A second change is noticed as well.
        model.resize(3 << 20);
        assert_eq!(host.event().await, Changed { lun: 2, code: 0x2a09 });
    });
}

#[test]
fn settings_of_another_host_are_an_event() {
    simulate(|disks| async move {
        let unit = disks.add(0, &Model::new(1 << 20, false));
        let (mut one, mut other) = (disks.host("a"), disks.host("b"));
        for host in [&mut one, &mut other] {
            host.settle(0, &[0; 6], &[]).await.ok();
            assert_eq!(host.events(), []);
        }
        // MODE SELECT (6) with the caching page: the write cache is turned off.
        let mut list = vec![0, 0, 0, 0, 0x08, 18, 0];
        list.resize(4 + 20, 0);
        one.run(0, &[0x15, 0x10, 0, 0, 24, 0], &list).await.ok();
        assert!(!unit.modes().has(Modes::CACHE));
        assert_eq!(other.event().await, Changed { lun: 0, code: 0x2a01 });
        assert_eq!(other.told(0).await, Some((6, 0x2a01)));
        assert_eq!(one.events(), [], "the host that has changed them knows");
        assert_eq!(one.told(0).await, None);
        unit.set_preferred_group(Some(1));
        assert_eq!(one.event().await, Changed { lun: 0, code: 0x2a06 });
    });
}

#[test]
fn units_that_come_and_go_are_events() {
    simulate(|disks| async move {
        disks.add(0, &Model::new(1 << 20, false));
        let (mut host, mut other) = (disks.host("a"), disks.host("b"));
        assert_eq!(host.events(), [], "units that exist already are no events");
        host.settle(0, &[0; 6], &[]).await.ok();
        disks.add(7, &Model::new(1 << 20, false));
        assert_eq!(host.event().await, Added { lun: 7 });
        assert_eq!(host.told(0).await, Some((6, 0x3f0e)));
        host.settle(7, &[0; 6], &[]).await.ok();
        let only_b = disks.spec(&Model::new(1 << 20, false), &["b"]);
        disks.target.add(8, only_b).expect("a free LUN");
        assert_eq!(host.events(), [], "a unit that the host does not see");
        assert_eq!(other.events(), [Added { lun: 7 }, Added { lun: 8 }]);
        disks.add(7, &Model::new(2 << 20, false));
        assert_eq!(host.events(), [Removed { lun: 7 }, Added { lun: 7 }], "another volume");
        assert_eq!(host.told(7).await, Some((6, 0x2900)));
        let gone = disks.target.remove(7).expect("a unit");
        assert_eq!(host.event().await, Removed { lun: 7 });
        let _ = gone.await;
        assert_eq!(host.told(7).await, Some((5, 0x2500)));
        drop(disks.target.remove_all());
        assert_eq!(host.events(), [Removed { lun: 0 }]);
    });
}

#[test]
fn too_many_events_become_one() {
    simulate(|disks| async move {
        let mut host = disks.host("a");
        let model = Model::new(1 << 20, false);
        for lun in 0..300 {
            disks.add(lun, &model);
        }
        assert_eq!(host.events(), [Missed]);
        disks.target.remove(3).map(drop).expect("a unit");
        assert_eq!(host.events(), [Removed { lun: 3 }]);
        drop(host);
        assert_eq!(Arc::strong_count(&disks.target.unit_at(0).expect("a unit")), 3, "of the target and of its catalog");
    });
}
