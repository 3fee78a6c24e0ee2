//! What hosts should not do: it costs them their own connection at most, and the target no more memory than it says.

mod common;

use common::*;
use forebay_block::{Buf, BufMut};
use forebay_nvmf::Limits;
use forebay_nvmf::session::Transfers;
use forebay_nvmf::wire::command::{FABRICS, Sgl};
use forebay_nvmf::wire::fabrics::fctype;
use forebay_nvmf::wire::pdu::{DataHeader, kind};
use forebay_nvmf::wire::{Sqe, Status};

#[test]
fn data_in_tiny_pieces_takes_no_more_memory_than_the_command() {
    const LEN: u32 = 256 * 1024;
    let mut transfers = Transfers::default();
    let tag = transfers.begin(5, LEN, ());
    let mut whole = None;
    for offset in 0..LEN {
        // A byte at a time, and each keeps a receive buffer in memory.
        let mut staging = BufMut::with_capacity(4096);
        staging.extend_from_slice(&[offset as u8; 4]);
        let header = DataHeader { cid: 5, tag, offset, len: 1 };
        transfers.check(&header, offset + 1 == LEN).expect("it comes in order");
        assert!(whole.is_none());
        whole = transfers.arrived(&header, staging.split_to(1).into(), true);
    }
    let ((), data, intact) = whole.expect("all of it is there");
    assert!(intact);
    let kept: usize = data.parts().iter().map(|part| part.retained()).sum();
    assert!(kept <= 2 * LEN as usize, "{kept} bytes are kept for {LEN}");
    assert!(data.to_vec().iter().enumerate().all(|(at, &byte)| byte == at as u8));
}
