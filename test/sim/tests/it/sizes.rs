//! The block oracle and devices whose size changes: what may be refused, what must be, and what a cut leaves.

use forebay_block::{BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, Result};
use forebay_sim::CrashKind;
use forebay_sim::oracle::{BLOCK, BlockOracle, Expected};
use forebay_sim::stamp::stamp;

fn oracle(size: u64) -> BlockOracle {
    let mut oracle = BlockOracle::new(Expected::nothing());
    oracle.set_size(size, size);
    oracle
}

fn write(block: u64, version: u64) -> BlockRequest {
    let offset = block * BLOCK;
    BlockRequest::Write { offset, data: stamp(offset, BLOCK as usize, version).into(), fua: false }
}

fn read(block: u64) -> BlockRequest {
    BlockRequest::Read(Extent::new(block * BLOCK, BLOCK))
}

fn refused() -> Result<BlockReply> {
    Err(Error::from(ErrorKind::OutOfRange))
}

fn serve(oracle: &mut BlockOracle, request: BlockRequest, answer: Result<BlockReply>) {
    let token = oracle.submit(&request);
    oracle.complete(token, &answer);
}

fn found(bytes: &[u8]) -> Result<BlockReply> {
    Ok(BlockReply::Data(BufList::from(forebay_block::Buf::copy_of(bytes))))
}

fn version(block: u64, version: u64) -> Vec<u8> {
    stamp(block * BLOCK, BLOCK as usize, version).to_vec()
}

const ZEROES: [u8; BLOCK as usize] = [0; BLOCK as usize];

#[test]
fn only_what_is_past_the_end_is_refused() {
    let mut sound = oracle(2 * BLOCK);
    serve(&mut sound, write(1, 1), Ok(BlockReply::Done));
    serve(&mut sound, write(2, 2), refused());
    serve(&mut sound, read(2), refused());
    // Refused, so nothing is there when the size has grown.
    sound.set_size(3 * BLOCK, 3 * BLOCK);
    serve(&mut sound, read(2), found(&ZEROES));
    assert_eq!(sound.violation(), None);
    serve(&mut sound, read(2), found(&version(2, 2)));
    assert!(sound.violation().is_some_and(|text| text.contains("saw what it may not")));

    let mut strict = oracle(2 * BLOCK);
    serve(&mut strict, write(1, 1), refused());
    assert!(strict.violation().is_some(), "refused within the size");

    let mut strict = oracle(2 * BLOCK);
    serve(&mut strict, write(2, 1), Ok(BlockReply::Done));
    assert!(strict.violation().is_some_and(|text| text.contains("was served")));

    let mut gone = oracle(2 * BLOCK);
    gone.set_ending();
    serve(&mut gone, write(1, 1), Err(ErrorKind::NotFound.into()));
    assert_eq!(gone.violation(), None);
}

#[test]
fn while_the_size_changes_either_answer_is_right() {
    let mut oracle = oracle(4 * BLOCK);
    let early = oracle.submit(&write(3, 1));
    let late = oracle.submit(&write(3, 2));
    oracle.set_size(2 * BLOCK, 4 * BLOCK);
    oracle.complete(early, &Ok(BlockReply::Done));
    oracle.complete(late, &refused());
    assert_eq!(oracle.violation(), None);
}

#[test]
fn what_was_cut_off_does_not_come_back() {
    for answered_before in [true, false] {
        for again in [ZEROES.to_vec(), version(3, 1), version(3, 2)] {
            let mut oracle = oracle(4 * BLOCK);
            serve(&mut oracle, write(3, 1), Ok(BlockReply::Done));
            let under_way = oracle.submit(&write(3, 2));
            oracle.set_size(2 * BLOCK, 4 * BLOCK);
            let cut = Extent::new(2 * BLOCK, 2 * BLOCK);
            let token = oracle.cut_begins(cut);
            if answered_before {
                oracle.complete(under_way, &Ok(BlockReply::Done));
            }
            oracle.cut_ends(token, cut, &Ok(()));
            oracle.set_size(4 * BLOCK, 4 * BLOCK);
            if !answered_before {
                oracle.complete(under_way, &Ok(BlockReply::Done));
            }
            oracle.crash(CrashKind::Power);
            oracle.recovered(3, &again, CrashKind::Power);
            // One that was answered only after the cut may have waited for the size to grow again.
            let allowed = again == ZEROES || (!answered_before && again == version(3, 2));
            assert_eq!(oracle.violation().is_none(), allowed, "answered before: {answered_before}");
        }
    }
}

#[test]
fn a_cut_that_failed_may_have_reached_any_part() {
    let cut = Extent::new(2 * BLOCK, 2 * BLOCK);
    for (third, fourth) in [(ZEROES.to_vec(), version(3, 1)), (version(2, 1), ZEROES.to_vec())] {
        let mut oracle = oracle(4 * BLOCK);
        oracle.expect(Expected { io: true, ..Expected::nothing() });
        (2..4).for_each(|block| serve(&mut oracle, write(block, 1), Ok(BlockReply::Done)));
        serve(&mut oracle, BlockRequest::Flush, Ok(BlockReply::Done));
        let token = oracle.cut_begins(cut);
        oracle.cut_ends(token, cut, &Err(ErrorKind::Io.into()));
        oracle.crash(CrashKind::Power);
        oracle.recovered(2, &third, CrashKind::Power);
        oracle.recovered(3, &fourth, CrashKind::Power);
        assert_eq!(oracle.violation(), None);
    }
}
