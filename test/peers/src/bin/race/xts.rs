//! AES-XTS in sectors and AES-GCM in messages: rates are bytes encrypted a second, the data in the cache.

use std::hint::black_box;

use forebay_accel::crypto::{Gcm, SectorSize, Xts};
use forebay_peers::cipher::{IsalCrypto, OpenSsl};

use crate::{Race, Series, Side};

/// Bytes a call of many sectors: an extent of the store.
const EXTENT: usize = 128 << 10;

/// All of it.
pub fn run(race: &Race) {
    eprintln!("{}", OpenSsl::version().unwrap_or_else(|| "no OpenSSL".into()));
    let key: Vec<u8> = (0..64).map(|byte| byte * 5 + 3).collect();
    for (size, goal) in [(SectorSize::Bytes512, 2.0), (SectorSize::Bytes4096, 2.0)] {
        for length in [size.get(), EXTENT] {
            for (bits, key, cipher) in [(128, &key[..32], c"EVP_aes_128_xts"), (256, &key[..], c"EVP_aes_256_xts")] {
                let case = format!("xts-{bits} sectors of {} in {}", size.get(), length);
                if race.wants("xts", &case) {
                    xts(race, &case, goal, key, cipher, size, length);
                }
            }
        }
    }
    for length in [64, 256, 1024, 4096, 16 << 10, 64 << 10] {
        for (bits, key, cipher) in [(128, &key[..16], c"EVP_aes_128_gcm"), (256, &key[..32], c"EVP_aes_256_gcm")] {
            let case = format!("gcm-{bits} {length}");
            if race.wants("xts", &case) {
                gcm(race, &case, if length >= 4096 { 2.0 } else { 0.0 }, key, cipher, length);
            }
        }
    }
}

fn xts(race: &Race, case: &str, goal: f64, key: &[u8], cipher: &std::ffi::CStr, size: SectorSize, length: usize) {
    let ours = Xts::new(key).expect("a key of a legal length");
    let mut theirs = OpenSsl::new(cipher, key).expect("Debian's OpenSSL");
    let plain: Vec<u8> = (0..length).map(|at| (at * 7 >> 2) as u8).collect();
    let (mut left, mut right) = (plain.clone(), plain.clone());
    ours.encrypt_in_place(size, 9, &mut left);
    theirs.xts(size.get(), 9, &mut right);
    assert!(left == right, "OpenSSL disagrees");
    let mut isal = (key.len() == 64).then(|| IsalCrypto::new(key)).flatten();
    if let Some(isal) = &mut isal {
        let mut third = plain.clone();
        isal.xts(size.get(), 9, &mut third);
        assert!(third == left, "ISA-L crypto disagrees");
    }
    let mut series = vec![Series::new("forebay", Side::Ours, move || {
        ours.encrypt_in_place(size, 1, black_box(&mut left));
        length
    })];
    series.push(Series::new("openssl", Side::Peer, move || {
        theirs.xts(size.get(), 1, black_box(&mut right));
        length
    }));
    race.run("xts", case, goal, &mut series);
    let Some(mut isal) = isal else { return };
    let ours = Xts::new(key).expect("a key of a legal length");
    let (mut left, mut right) = (plain.clone(), plain);
    let mut series = [
        Series::new("forebay", Side::Ours, move || {
            ours.encrypt_in_place(size, 1, black_box(&mut left));
            length
        }),
        Series::new("isa-l_crypto", Side::Peer, move || {
            isal.xts(size.get(), 1, black_box(&mut right));
            length
        }),
    ];
    race.run("xts", &format!("{case} vs isa-l"), 0.95, &mut series);
}

fn gcm(race: &Race, case: &str, goal: f64, key: &[u8], cipher: &std::ffi::CStr, length: usize) {
    let ours = Gcm::new(key).expect("a key of a legal length");
    let mut theirs = OpenSsl::new(cipher, key).expect("Debian's OpenSSL");
    let (mut left, mut right) = (vec![3; length], vec![3; length]);
    let nonce = [5; 12];
    assert_eq!(ours.seal(&nonce, &[], &mut left), theirs.gcm(&nonce, &mut right));
    assert!(left == right, "OpenSSL disagrees");
    let mut count = 0u64;
    let mut series = vec![Series::new("forebay", Side::Ours, move || {
        count += 1;
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&count.to_le_bytes());
        black_box(ours.seal(&nonce, &[], black_box(&mut left)));
        length
    })];
    let mut count = 0u64;
    series.push(Series::new("openssl", Side::Peer, move || {
        count += 1;
        let mut nonce = [0; 12];
        nonce[..8].copy_from_slice(&count.to_le_bytes());
        black_box(theirs.gcm(&nonce, black_box(&mut right)));
        length
    }));
    race.run("xts", case, goal, &mut series);
}
