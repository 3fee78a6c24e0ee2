//! Tests of the encryption of payloads.

use forebay_reactor::{DriverChoice, Reactor};
use proptest::prelude::*;

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key() -> DataKey {
    DataKey::from_bytes(&std::array::from_fn(|at| at as u8))
}

const LOG: LogId = *b"0123456789abcdef";

/// Returns a cipher with a salt that is not drawn.
fn cipher(run: u32, salt: u32, first_seq: u64, former: Vec<(u64, CipherRun)>) -> PayloadCipher {
    let own = CipherRun { run, salt };
    let own_key = Rc::new(PayloadCipher::expand(&key(), &LOG, own).expect("a key"));
    PayloadCipher { key: key(), log: LOG, own, own_key, first_seq, former, keys: RefCell::default() }
}

fn payload(len: usize) -> BufList {
    BufList::from(Buf::copy_of(&(0..len).map(|at| (at * 7) as u8).collect::<Vec<u8>>()))
}

#[test]
fn a_check_value_is_what_it_was() {
    assert_eq!(hex(&key_check(&key(), &LOG)), include_str!("golden/check.hex").trim());
    let other = DataKey::from_bytes(&[7; DATA_KEY_LEN]);
    assert_ne!(key_check(&other, &LOG), key_check(&key(), &LOG));
    assert_ne!(key_check(&key(), &[1; 16]), key_check(&key(), &LOG), "logs of one key cannot be told to have it");
}

#[test]
fn an_encrypted_payload_is_what_it_was() {
    let stored = cipher(5, 0x0403_0201, 77, Vec::new()).seal(77, &payload(1000), 64);
    assert_eq!(stored.len(), 1024);
    assert_eq!(hex(&stored[..32]), include_str!("golden/payload-head.hex").trim());
    assert_eq!(hex(&stored[992..1008]), include_str!("golden/payload-tail.hex").trim());
    assert!(stored[1008..].iter().all(|&byte| byte == 0));
}

/// Compares with the library's cipher, and a key derived step by step as the format says.
#[test]
fn a_payload_is_encrypted_as_the_format_says() {
    let numbers = [5u32.to_le_bytes(), 9u32.to_le_bytes()].concat();
    let half = |label: &[u8]| hmac_sha256(key().bytes(), &[&[label, &LOG, &numbers].concat()]);
    let run_key = [half(b"forebay write log: data"), half(b"forebay write log: tweak")].concat();
    let xts = Xts::new(&run_key).expect("a key");
    let stored = cipher(5, 9, 0, Vec::new()).seal(3, &payload(2048), 512);
    let mut expected = payload(2048).to_vec();
    for (index, sector) in expected.chunks_exact_mut(512).enumerate() {
        xts.encrypt_in_place(SectorSize::Bytes512, 3 * 128 + index as u64, sector);
    }
    assert!(stored[..] == expected[..]);
}

#[test]
fn entries_of_former_runs_are_decrypted_with_their_keys() {
    let runs: Vec<CipherRun> = (1..9).map(|run| CipherRun { run, salt: run ^ 0x55 }).collect();
    let stored: Vec<Buf> = (0..80)
        .map(|seq: u64| {
            let run = runs[seq as usize / 10];
            cipher(run.run, run.salt, seq, Vec::new()).seal(seq, &payload(100 + seq as usize), 16)
        })
        .collect();
    let former = runs.iter().enumerate().map(|(at, run)| (10 * at as u64, *run)).collect();
    let now = cipher(9, 1, 80, former);
    for round in 0..2 {
        for seq in (0..80).rev().chain(0..80) {
            let len = 100 + seq as usize;
            let opened = now.open(seq, &stored[seq as usize], len).expect("whole");
            assert!(opened[..] == payload(len).to_vec()[..], "entry {seq}, round {round}");
        }
    }
    assert_eq!(now.keys.borrow().len(), KEYS_KEPT);
    assert_eq!(now.open(3, &stored[3][..80], 103).err().map(|error| error.kind()), Some(ErrorKind::Corrupt));
}

#[test]
fn runs_are_taken_from_the_entries_that_were_found() {
    let record = |seq, term, salt| EntryRecord {
        kind: crate::format::EntryKind::Discard,
        extent: forebay_block::Extent::new(0, 512),
        seq,
        generation: 1,
        place: 0,
        crc: 0,
        time_ms: 0,
        term,
        salt: Some(salt),
    };
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(async {
        let found = [record(5, 1, 8), record(6, 1, 8), record(7, 1, 9), record(8, 2, 9)];
        let cipher = PayloadCipher::new(&key(), &LOG, 3, &found, 9).expect("a key");
        let runs: Vec<_> = cipher.former.iter().map(|(first, run)| (*first, run.run, run.salt)).collect();
        assert_eq!(runs, [(5, 1, 8), (7, 1, 9), (8, 2, 9)]);
        assert!(cipher.key_of(4).is_err() && cipher.key_of(5).is_ok() && cipher.key_of(9).is_ok());
        let again = PayloadCipher::new(&key(), &LOG, 3, &found, 9).expect("a key");
        assert_ne!(again.own, cipher.own, "the same run has another salt when it is opened again");
    });
}

#[test]
fn keys_are_required_by_what_a_log_says() {
    let (right, wrong) = (key(), DataKey::from_bytes(&[7; DATA_KEY_LEN]));
    let known = key_check(&right, &LOG);
    let require = |known, key| require_key(known, key, &LOG, "/logs: log 1").err().map(|error| error.to_string());
    assert_eq!(require(None, None), None);
    assert_eq!(require(None, Some(&right)), None);
    assert_eq!(require(Some(&known), Some(&right)), None);
    let says = require(Some(&known), Some(&wrong)).expect("another key");
    assert!(says.contains("/logs: log 1 is encrypted with another key"), "{says}");
    let says = require(Some(&known), None).expect("no key");
    assert!(says.contains("/logs: log 1 is encrypted, and no key was given"), "{says}");
}

#[test]
fn two_contents_with_one_tweak_are_noticed() {
    crate::tweaks::start();
    let cipher = cipher(1, 2, 0, Vec::new());
    cipher.seal(3, &payload(512), 512);
    cipher.seal(3, &payload(512), 512);
    cipher.seal(4, &payload(1024), 512);
    assert_eq!(crate::tweaks::finish(), Ok(2));
    crate::tweaks::start();
    cipher.seal(3, &payload(512), 512);
    cipher.seal(3, &payload(1024), 512);
    assert!(crate::tweaks::finish().is_err());
}

proptest! {
    #[test]
    fn payloads_of_any_length_are_decrypted_as_they_were(
        len in prop_oneof![1..40_usize, 500..530_usize, 1..5000_usize, 65_500..=65_536_usize],
        cuts in prop::collection::vec(0..65_536_usize, 0..4),
        seq in prop_oneof![0..1000_u64, (1_u64 << 47) - 9..1 << 47],
        unit in prop::sample::select(vec![16, 64, 512, 4096]),
        run: u32,
        salt: u32,
    ) {
        let cipher = cipher(run, salt, 0, Vec::new());
        let plain = payload(len).to_vec();
        let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut < len).chain([0, len]).collect();
        cuts.sort_unstable();
        let list: BufList = cuts.windows(2).map(|pair| Buf::copy_of(&plain[pair[0]..pair[1]])).collect();
        let stored = cipher.seal(seq, &list, unit);
        prop_assert_eq!(stored.len(), len.next_multiple_of(unit));
        let kept = len.next_multiple_of(16);
        prop_assert!(stored[kept..].iter().all(|&byte| byte == 0));
        prop_assert!(len < 16 || stored[..kept] != plain[..]);
        prop_assert_eq!(cipher.open(seq, &stored, len).expect("whole").to_vec(), plain.clone());
        prop_assert_eq!(cipher.open(seq, &stored[..kept], len).expect("whole").to_vec(), plain.clone());
        // The same content elsewhere is something else.
        prop_assert!(cipher.seal(seq ^ 1, &list, unit)[..kept] != stored[..kept]);
        prop_assert!(self::cipher(run ^ 1, salt, 0, Vec::new()).seal(seq, &list, unit)[..kept] != stored[..kept]);
        prop_assert!(self::cipher(run, salt ^ 1, 0, Vec::new()).seal(seq, &list, unit)[..kept] != stored[..kept]);
    }
}
