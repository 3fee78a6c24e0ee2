#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| forebay_writelog::fuzz::decode_sealed(data));
