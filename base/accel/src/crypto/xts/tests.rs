//! XTS against the standard's vectors, its definition, and itself on other tiers.

use aws_lc_sys as aws;
use proptest::prelude::*;

use super::*;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

/// IEEE 1619-2007 annex B, vectors 4 (AES-128, data unit 0) and 10 (AES-256, data unit 0xff): the plaintext is
/// the bytes 00 to ff twice.
#[test]
fn vectors_of_ieee_1619() {
    let e = "27182818284590452353602874713526";
    let pi = "31415926535897932384626433832795";
    let plain: Vec<u8> = (0..=255).chain(0..=255).collect();

    let long = "2718281828459045235360287471352662497757247093699959574966967627\
                3141592653589793238462643383279502884197169399375105820974944592";
    for tier in Tier::available() {
        let xts = Xts::with_tier(&hex(&format!("{e}{pi}")), tier).unwrap();
        let mut data = plain.clone();
        xts.encrypt_in_place(SectorSize::Bytes512, 0u64, &mut data);
        assert_eq!(data[..32], hex("27a7479befa1d476489f308cd4cfa6e2a96e4bbe3208ff25287dd3819616e89c"), "{tier}");
        xts.decrypt_in_place(SectorSize::Bytes512, 0u64, &mut data);
        assert_eq!(data, plain);

        let xts = Xts::with_tier(&hex(long), tier).unwrap();
        let mut data = vec![0; 512];
        xts.encrypt(SectorSize::Bytes512, 0xFFu64, &plain, &mut data);
        assert_eq!(data[..32], hex("1c3b3a102f770386e4836c99e370cf9bea00803f5e482357a4ae12d414a3e63b"), "{tier}");
        let mut back = vec![0; 512];
        xts.decrypt(SectorSize::Bytes512, 0xFFu64, &data, &mut back);
        assert_eq!(back, plain);
    }
}

#[test]
fn a_stronger_tier_selects_no_weaker_implementation() {
    for (aes, vaes) in [(false, false), (true, false), (true, true)] {
        for tier in Tier::ALL {
            for lower in Tier::ALL.into_iter().filter(|lower| *lower <= tier) {
                assert!(Implementation::of(lower, aes, vaes) <= Implementation::of(tier, aes, vaes), "{lower} {tier}");
            }
        }
    }
    assert_eq!(Implementation::of(Tier::Gfni, true, true), Implementation::Vaes);
    assert_eq!(Implementation::of(Tier::Avx512, true, true), Implementation::Vaes256);
    assert_eq!(Implementation::of(Tier::Avx512, true, false), Implementation::AesNi);
    assert_eq!(Implementation::of(Tier::Avx2, false, true), Implementation::Plain);
    assert_eq!(Implementation::of(Tier::Sse, true, true), Implementation::AesNi);
    assert_eq!(Implementation::of(Tier::Neon, true, true), Implementation::Plain);
}

#[test]
fn keys_that_will_not_do() {
    assert_eq!(Xts::new(&[1; 48]).err(), Some(CipherKeyError::Length(48, "32 or 64")));
    assert_eq!(Xts::new(&[1; 64]).err(), Some(CipherKeyError::HalvesEqual));
    assert_eq!(Xts::new(&[]).err(), Some(CipherKeyError::Length(0, "32 or 64")));
}

#[test]
fn a_key_is_not_shown() {
    let key: Vec<u8> = (100..164).collect();
    assert_eq!(format!("{:?}", Xts::new(&key).unwrap()), "Xts(AES-256, key hidden)");
}

#[test]
#[should_panic(expected = "no whole number")]
fn part_of_a_sector_is_refused() {
    Xts::new(&(0..64).collect::<Vec<u8>>()).unwrap().encrypt_in_place(SectorSize::Bytes512, 0u64, &mut [0; 511]);
}

proptest! {
    /// Many sectors in one call, in place or not, are what the definition says of each alone, on every tier.
    #[test]
    fn many_sectors_are_those_of_the_definition(
        key in proptest::collection::vec(any::<u8>(), 64),
        short: bool,
        low in prop_oneof![any::<u32>().prop_map(u64::from), 0u64..u64::MAX - 80],
        high in prop_oneof![Just(0), any::<u64>()],
        count in 0usize..70,
        large: bool,
        seed: u8,
    ) {
        let key = if short { &key[..32] } else { &key[..] };
        prop_assume!(key[..key.len() / 2] != key[key.len() / 2..]);
        let (size, count) = if large { (SectorSize::Bytes4096, count / 8) } else { (SectorSize::Bytes512, count) };
        let plain: Vec<u8> = (0..count * size.get()).map(|at| ((at * 31) >> 3) as u8 ^ seed).collect();
        let numbered = plain.chunks(size.get()).enumerate();
        let sealed: Vec<u8> =
            numbered.flat_map(|(number, piece)| by_definition(key, low + number as u64, high, piece)).collect();
        let sector = SectorNumber { low, high };
        for (tier, shape) in Tier::available().flat_map(|tier| XtsShape::ALL.map(|shape| (tier, shape))) {
            let xts = Xts::with_shape(key, tier, shape).unwrap().clone();
            let mut data = plain.clone();
            xts.encrypt_in_place(size, sector, &mut data);
            prop_assert!(data == sealed, "{} in place", tier);
            xts.decrypt_in_place(size, sector, &mut data);
            prop_assert!(data == plain, "{} back in place", tier);
            // A byte off every alignment.
            let from = [&[0][..], &sealed].concat();
            let mut to = vec![0; plain.len() + 3];
            xts.decrypt(size, sector, &from[1..], &mut to[3..]);
            prop_assert!(to[3..] == plain, "{} back", tier);
            let from = [&[0][..], &plain].concat();
            xts.encrypt(size, sector, &from[1..], &mut to[3..]);
            prop_assert!(to[3..] == sealed, "{}", tier);
        }
    }
}

/// Compares with the library's AES-256-XTS, for the sizes that it supports.
#[test]
fn agrees_with_the_library() {
    let key: Vec<u8> = (0..64).map(|byte| byte * 3 + 1).collect();
    let plain: Vec<u8> = (0..4096u32).map(|at| ((at * at) >> 5) as u8).collect();
    let mut theirs = vec![0; 4096];
    let tweak = 0x0123_4567_89AB_CDEFu128.to_le_bytes();
    // SAFETY: the context lives until it is freed, the key has 64 bytes, the tweak 16, both buffers 4096.
    unsafe {
        let context = aws::EVP_CIPHER_CTX_new();
        let cipher = aws::EVP_aes_256_xts();
        let none = std::ptr::null_mut();
        assert_eq!(aws::EVP_EncryptInit_ex(context, cipher, none, key.as_ptr(), tweak.as_ptr()), 1);
        let mut length = 0;
        assert_eq!(aws::EVP_EncryptUpdate(context, theirs.as_mut_ptr(), &mut length, plain.as_ptr(), 4096), 1);
        aws::EVP_CIPHER_CTX_free(context);
    }
    for tier in Tier::available() {
        let mut data = plain.clone();
        let xts = Xts::with_tier(&key, tier).unwrap();
        xts.encrypt_in_place(SectorSize::Bytes4096, 0x0123_4567_89AB_CDEFu64, &mut data);
        assert!(data == theirs, "{tier}");
    }
}

/// XTS as IEEE 1619 section 5.3 writes it down, one block at a time.
fn by_definition(key: &[u8], low: u64, high: u64, plain: &[u8]) -> Vec<u8> {
    let (data_key, tweak_key) = key.split_at(key.len() / 2);
    let mut tweak = u128::from_le_bytes(aes(tweak_key, (u128::from(high) << 64 | u128::from(low)).to_le_bytes()));
    let mut out = Vec::new();
    for block in plain.chunks(16) {
        let mixed = u128::from_le_bytes(block.try_into().unwrap()) ^ tweak;
        let sealed = u128::from_le_bytes(aes(data_key, mixed.to_le_bytes())) ^ tweak;
        out.extend_from_slice(&sealed.to_le_bytes());
        tweak = tweak << 1 ^ if tweak >> 127 == 1 { 0x87 } else { 0 };
    }
    out
}

fn aes(key: &[u8], block: [u8; 16]) -> [u8; 16] {
    let mut schedule = std::mem::MaybeUninit::<aws::AES_KEY>::uninit();
    let mut out = [0; 16];
    // SAFETY: the key has the length that is given in bits, and the schedule is filled before it is used.
    unsafe {
        aws::AES_set_encrypt_key(key.as_ptr(), key.len() as u32 * 8, schedule.as_mut_ptr());
        aws::AES_encrypt(block.as_ptr(), out.as_mut_ptr(), schedule.as_ptr());
    }
    out
}
