//! Entry points of the fuzzers and property tests. They take bytes and panic when an invariant is broken.

use crate::cdb::{self, PrOut, Transfer};
use crate::lun::Lun;
use crate::naming::ScsiNaming;
use crate::ports::{PortGroupStates, TargetPort};
use crate::{BLOCK, copy, inquiry, mode, opcodes, reserve};

/// Checks that commands and their parameter lists are parsed or rejected.
pub fn commands(data: &[u8]) {
    let Some((cdb, list)) = data.split_first_chunk::<16>() else { return };
    if let Ok(command) = cdb::parse(cdb) {
        assert!(
            opcodes::report(false, 0, 0, 0).is_ok_and(|all| all[4..].chunks(8).any(|one| one[0] == cdb[0])),
            "a command that is not listed is understood"
        );
        if let Transfer::In(len) | Transfer::Out(len) = command.transfer(BLOCK) {
            assert!(len <= 2 * u64::from(u32::MAX) * u64::from(BLOCK));
        }
    }
    let pages = mode::ModePages { modes: mode::Modes::DEFAULT, read_only: false, blocks: 1 << 33, threshold: Some(1) };
    let _ = mode::select(cdb[0] & 1 != 0, list, &pages);
    let ask = mode::Ask {
        ten: cdb[1] & 1 != 0,
        no_descriptor: cdb[1] & 8 != 0,
        long: cdb[1] & 16 != 0,
        control: cdb[2] >> 6,
        page: cdb[2] & 0x3f,
        subpage: cdb[3],
    };
    if let Ok(sensed) = mode::sense(&ask, &pages)
        && ask.control == 0
    {
        assert_eq!(mode::select(ask.ten, &sensed, &pages), Ok(pages.modes), "what is sensed can be selected");
    }
    if let Ok(copy) = copy::parse(list) {
        assert!(copy.segments.iter().all(|segment| usize::from(segment.from.max(segment.to)) < copy.targets.len()));
    }
    let _ = inquiry::unmap_list(list).map(Iterator::count);
    let ports = [TargetPort::SINGLE, TargetPort { group: 2, relative_id: 2 }];
    let states = PortGroupStates::of(&ports, Some(2));
    if states.check_request(list).is_ok() {
        let requested = list.get(4..).unwrap_or_default().chunks_exact(4);
        assert!(requested.into_iter().all(|one| [[1, 1], [0, 2]].contains(&[one[0] & 0x0f, one[3]])), "a change");
    }
    let _ = opcodes::report(cdb[2] & 0x80 != 0, cdb[2] & 7, cdb[3], u16::from(cdb[5]));
    let namings = [ScsiNaming::Iscsi("iqn.t".into()), ScsiNaming::Naa([0x30; 8])];
    for action in [PrOut::Register, PrOut::Reserve, PrOut::Preempt, PrOut::RegisterAndMove] {
        for naming in &namings {
            let _ = reserve::action(action, cdb[2], list, (naming, &ports));
        }
    }
    if let Some((lun, _)) = list.split_first_chunk::<8>()
        && let lun @ Lun::Unit(_) = Lun::parse(lun)
    {
        assert_eq!(Lun::parse(&lun.to_bytes()), lun, "a LUN has one meaning");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn noise_is_harmless(data in prop::collection::vec(any::<u8>(), 0..600)) {
            commands(&data);
        }

        #[test]
        fn commands_of_all_kinds_are_harmless(
            opcode: u8,
            rest in prop::array::uniform15(any::<u8>()),
            list in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut data = vec![opcode];
            data.extend(rest);
            data.extend(list);
            commands(&data);
        }
    }
}
