//! Commands of one host.

use forebay_load::model::Model;
use forebay_scsi::{Lun, TargetPort, TargetPorts};

use crate::common::{TARGET, read, simulate, write};

#[test]
fn hosts_find_units_and_use_them() {
    simulate(|disks| async move {
        let (small, large) = (Model::new(1 << 20, true), Model::new(4 << 20, true));
        disks.add(0, &small);
        disks.add(300, &large);
        let mut host = disks.host("a");
        let luns = host.run(0, &[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], &[]).await.ok();
        let listed: Vec<Lun> =
            luns[8..].chunks(8).map(|lun| Lun::parse(lun.try_into().expect("eight bytes"))).collect();
        assert_eq!(listed, [Lun::Unit(0), Lun::Unit(300)]);
        assert_eq!(host.told(300).await, Some((6, 0x2900)), "the first command to a unit");
        let capacity = host.run(300, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]).await.ok();
        assert_eq!(capacity[..4], (8191u32).to_be_bytes());
        let data: Vec<u8> = (0..3 * 512).map(|at| (at % 251) as u8).collect();
        host.run(300, &write(7, 3), &data).await.ok();
        assert_eq!(host.run(300, &read(7, 3), &[]).await.ok(), data);
        assert_eq!(large.at(7), 0);
        assert_eq!(host.settle(0, &read(0, 1), &[]).await.ok(), [0; 512]);
        assert_eq!(host.told(5).await, Some((5, 0x2500)), "no unit");
        assert_eq!(host.run(0, &read(4000, 1), &[]).await.failure(), (2, Some((5, 0x2100))));
        assert_eq!(host.session.luns(), [0, 300]);
        assert_eq!(disks.target.units().len(), 2);
    });
}

#[test]
fn lengths_that_contradict_a_command_are_refused() {
    simulate(|disks| async move {
        let model = Model::new(1 << 20, false);
        disks.add(0, &model);
        let mut host = disks.host("a");
        host.settle(0, &[0; 6], &[]).await.ok();
        assert_eq!(host.run(0, &write(0, 2), &[1; 700]).await.failure(), (2, Some((5, 0x0e03))));
        assert_eq!(model.at(0), 0);
        // Whole blocks, but fewer than the command has, are written.
        host.run(0, &write(0, 2), &[1; 512]).await.ok();
        assert_eq!((model.at(0), model.at(1)), (1, 0));
        // More than the command has is left.
        host.run(0, &write(4, 1), &[2; 1024]).await.ok();
        assert_eq!((model.at(4), model.at(5)), (2, 0));
        let same = [0x93, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0];
        assert_eq!(host.run(0, &same, &[3; 1024]).await.failure(), (2, Some((5, 0x2400))));
    });
}

#[test]
fn targets_and_ports_have_identifiers() {
    simulate(|disks| async move {
        disks.add(0, &Model::new(1 << 20, false));
        let mut host = disks.host("a");
        let page = host.run(0, &[0x12, 1, 0x83, 1, 0, 0], &[]).await.ok();
        let contains = |page: &[u8], wanted: &[u8]| page.windows(wanted.len()).any(|window| window == wanted);
        assert!(contains(&page, &[&[0x61, 0xa3, 0, 8][..], &TARGET].concat()), "{page:x?}");
        // Query task, query task set, I_T nexus reset are supported.
        let functions = host.run(0, &[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0], &[]);
        assert_eq!(functions.await.failure().1, Some((6, 0x2900)));
        let functions = host.run(0, &[0xa3, 0x0d, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0], &[]).await.ok();
        assert_eq!(functions[..2], [0xde, 0x03]);
        let port = |group: u16| TargetPort { group, relative_id: group };
        let ports = TargetPorts::new(port(2), [port(1)]).expect("valid");
        disks.target.set_ports(Some(std::sync::Arc::new(ports)));
        assert_eq!(host.told(0).await, Some((6, 0x3f03)));
        assert_eq!(host.told(0).await, Some((6, 0x2a06)));
        let page = host.run(0, &[0x12, 1, 0x83, 1, 0, 0], &[]).await.ok();
        assert!(contains(&page, &[0x61, 0x94, 0, 4, 0, 0, 0, 2]), "{page:x?}");
    });
}
