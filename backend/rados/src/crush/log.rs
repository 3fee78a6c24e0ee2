//! Fixed-point logarithm used by straw2 buckets.
//!
//! Every client must compute identical bits, so the tables are part of the algorithm.  Those for the upper bits follow
//! from their definition and are computed; the one for the lower bits deviates from it in the last bits, and is
//! literal.

use std::sync::LazyLock;

/// Reciprocal of `1 + k/128`, rounded up, and its binary logarithm, rounded down, for `k` in 0..=128. Both are scaled
/// by 2^48.
static COARSE: LazyLock<[(u64, u64); 129]> = LazyLock::new(|| {
    let mut table = [(0, 0); 129];
    for (k, entry) in (0u64..).zip(&mut table) {
        *entry = (((1u64 << 55) / (128 + k)) + u64::from(!(1u64 << 55).is_multiple_of(128 + k)), log2(128 + k));
    }
    // The last value is not 2^48, which would not fit into 48 bits.
    table[128].1 = 0xffff_0000_0000;
    table
});

/// Returns the binary logarithm of `n / 128`, for `n` from 128 to 255, scaled by 2^48 and rounded down. Computed by
/// squaring, one bit at a time.
fn log2(n: u64) -> u64 {
    // Fixed point: 1 <= value < 2, with 120 fractional bits, of which the squares retain enough.
    const POINT: u32 = 120;
    let mut value = u128::from(n) << (POINT - 7);
    let mut log = 0;
    for _ in 0..48 {
        value = square(value, POINT);
        log <<= 1;
        if value >> (POINT + 1) != 0 {
            value >>= 1;
            log |= 1;
        }
    }
    log
}

/// Returns the square of a number below 4 with `point` fractional bits, rounded down.
fn square(value: u128, point: u32) -> u128 {
    let (high, low) = (value >> 64, value & u128::from(u64::MAX));
    // Computes (high * 2^64 + low)^2 / 2^point in parts that each fit.
    let cross = high * low;
    let low_square = (low * low) >> 64;
    let middle = low_square + ((cross & ((1 << 63) - 1)) << 1);
    let top = high * high + (cross >> 63) + (middle >> 64);
    let rest = middle & u128::from(u64::MAX);
    (top << (128 - point)) | (rest >> (point - 64))
}

/// Approximate binary logarithm of `1 + k/2^15` for `k` in 0..256, scaled by 2^48.
const FINE: [u64; 256] = [
    0x0000_0000_0000,
    0x0002_e2a6_0a00,
    0x0007_0cb6_4ec5,
    0x0009_ef50_ce67,
    0x000c_d1e5_88fd,
    0x000f_b474_7e9c,
    0x0012_96fd_af5e,
    0x0015_7981_1b58,
    0x0018_5bfe_c2a1,
    0x001b_3e76_a552,
    0x001e_20e8_c380,
    0x0021_0355_1d43,
    0x0023_e5bb_b2b2,
    0x0026_c81c_83e4,
    0x0029_aa77_90f0,
    0x002c_8ccc_d9ed,
    0x002f_6f1c_5ef2,
    0x0032_5166_2017,
    0x0035_33aa_1d71,
    0x0038_15e8_571a,
    0x003a_f820_cd26,
    0x003d_da53_7fae,
    0x0040_bc80_6ec8,
    0x0043_9ea7_9a8c,
    0x0046_80c9_0310,
    0x0049_62e4_a86c,
    0x004c_44fa_8ab6,
    0x004f_270a_aa06,
    0x0052_0915_0672,
    0x0054_eb19_a013,
    0x0057_cd18_76fd,
    0x005a_af11_8b4a,
    0x005d_9104_dd0f,
    0x0060_72f2_6c64,
    0x0063_54da_3960,
    0x0066_36bc_441a,
    0x0069_1898_8ca8,
    0x006b_fa6f_1322,
    0x006e_dc3f_d79f,
    0x0071_be0a_da35,
    0x0074_9fd0_1afd,
    0x0077_818f_9a0c,
    0x007a_6349_577a,
    0x007d_44fd_535e,
    0x0080_26ab_8dce,
    0x0083_0854_06e3,
    0x0085_e9f6_beb2,
    0x0088_cb93_b552,
    0x008b_ad2a_eadc,
    0x008e_8ebc_5f65,
    0x0091_7048_1305,
    0x0094_51ce_05d3,
    0x0097_334e_37e5,
    0x009a_14c8_a953,
    0x009c_f63d_5a33,
    0x009f_d7ac_4a9d,
    0x00a2_b07f_3458,
    0x00a5_9a78_ea6a,
    0x00a8_7bd6_99fb,
    0x00ab_5d2e_8970,
    0x00ae_3e80_b8e3,
    0x00b1_1fcd_2869,
    0x00b4_0113_d818,
    0x00b6_e254_c80a,
    0x00b9_c38f_f853,
    0x00bc_a4c5_690c,
    0x00bf_85f5_1a4a,
    0x00c2_671f_0c26,
    0x00c5_4843_3eb6,
    0x00c8_2961_b211,
    0x00cb_0a7a_664d,
    0x00cd_eb8d_5b82,
    0x00d0_cc9a_91c8,
    0x00d3_ada2_0933,
    0x00d6_8ea3_c1dd,
    0x00d9_6f9f_bbdb,
    0x00dc_5095_f744,
    0x00df_3186_7430,
    0x00e2_1271_32b5,
    0x00e4_f356_32ea,
    0x00e7_d435_74e6,
    0x00ea_b50e_f8c1,
    0x00ed_95e2_be90,
    0x00f0_76b0_c66c,
    0x00f3_5779_106a,
    0x00f6_383b_9ca2,
    0x00f9_18f8_6b2a,
    0x00fb_f9af_7c1a,
    0x00fe_da60_cf88,
    0x0101_bb0c_658c,
    0x0104_9bb2_3e3c,
    0x0107_7c52_59af,
    0x010a_5cec_b7fc,
    0x010d_3d81_593a,
    0x0110_1e10_3d7f,
    0x0112_fe99_64e4,
    0x0115_df1c_cf7e,
    0x0118_bf9a_7d64,
    0x011b_a012_6ead,
    0x011e_8084_a371,
    0x0121_60f1_1bc6,
    0x0124_4157_d7c3,
    0x0127_21b8_d77f,
    0x012a_0214_1b10,
    0x012c_e269_a28e,
    0x012f_c2b9_6e0f,
    0x0132_a303_7daa,
    0x0135_8347_d177,
    0x0138_6386_698c,
    0x013b_43bf_45ff,
    0x013e_23f2_66e9,
    0x0141_041f_cc5e,
    0x0143_e447_7678,
    0x0146_c469_654b,
    0x0149_a485_98f0,
    0x014c_849c_117c,
    0x014f_64ac_cf08,
    0x0152_44b7_d1a9,
    0x0155_24bd_1976,
    0x0158_04bc_a687,
    0x015a_e4b6_78f2,
    0x015d_c4aa_90ce,
    0x0160_a498_ee31,
    0x0163_8481_9134,
    0x0166_6464_79ec,
    0x0169_4441_a870,
    0x016c_2419_1cd7,
    0x016d_f6ca_19bd,
    0x0171_e3b6_d7aa,
    0x0174_c37d_1e44,
    0x0177_a33d_ab1c,
    0x017a_82f8_7e49,
    0x017d_62ad_97e2,
    0x0180_425c_f7fe,
    0x0182_b07f_3458,
    0x0186_01aa_8c19,
    0x0188_e148_c046,
    0x018b_c0e1_3b52,
    0x018e_a073_fd52,
    0x0191_8001_065d,
    0x0194_5f88_568b,
    0x0197_3f09_edf2,
    0x019a_1e85_ccaa,
    0x019c_fdfb_f2c8,
    0x019f_dd6c_6063,
    0x01a2_bcd7_1593,
    0x01a5_9c3c_126e,
    0x01a8_7b9b_570b,
    0x01ab_5af4_e380,
    0x01ae_3a48_b7e5,
    0x01b1_1996_d450,
    0x01b3_f8df_38d9,
    0x01b6_d821_e595,
    0x01b9_b75e_da9b,
    0x01bc_9696_1803,
    0x01bf_75c7_9de3,
    0x01c2_54f3_6c51,
    0x01c5_3419_8365,
    0x01c8_1339_e336,
    0x01ca_f254_8bd9,
    0x01cd_d169_7d67,
    0x01d0_b078_b7f5,
    0x01d3_8f82_3b9a,
    0x01d6_6e86_086d,
    0x01d9_4d84_1e86,
    0x01dc_2c7c_7df9,
    0x01df_0b6f_26df,
    0x01e1_ea5c_194e,
    0x01e4_c943_555d,
    0x01e7_a824_db23,
    0x01ea_8700_aab5,
    0x01ed_65d6_c42b,
    0x01f0_44a7_279d,
    0x01f3_2371_d51f,
    0x01f6_0236_ccca,
    0x01f8_e0f6_0eb3,
    0x01fb_bfaf_9af3,
    0x01fe_9e63_719e,
    0x0201_7d11_92cc,
    0x0204_5bb9_fe94,
    0x0207_3a5c_b50d,
    0x0209_c06e_6212,
    0x020c_f791_026a,
    0x020f_d622_997c,
    0x0212_b07f_3458,
    0x0215_9334_a8d8,
    0x0218_71b5_2150,
    0x021b_502f_e517,
    0x021d_6a73_a78f,
    0x0221_0d14_4eee,
    0x0223_eb7d_f52c,
    0x0226_c9e1_e713,
    0x0229_a840_24bb,
    0x022c_2367_9b4e,
    0x022f_64eb_83a8,
    0x0232_4338_a51b,
    0x0235_2180_12a9,
    0x0237_ffc1_cc69,
    0x023a_2c3b_0ea4,
    0x023d_13ee_805b,
    0x0240_35e9_221f,
    0x0243_788f_af25,
    0x0246_56b4_e735,
    0x0247_ed64_6bfe,
    0x024c_12ee_3d98,
    0x024e_f102_5c1a,
    0x0251_cf10_c799,
    0x0254_9264_4d65,
    0x0257_8b1c_85ee,
    0x025a_6919_d8f0,
    0x025d_13ee_805b,
    0x0260_2503_6716,
    0x0262_9645_3882,
    0x0265_e0d6_2b53,
    0x0268_beb7_01f3,
    0x026b_9c92_265e,
    0x026d_32f7_98a9,
    0x0271_5837_58eb,
    0x0274_3601_673b,
    0x0277_13c5_c3b0,
    0x0279_f184_6e5f,
    0x027c_cf3d_6761,
    0x027e_6580_aecb,
    0x0282_8a9e_44b3,
    0x0285_6846_2932,
    0x0287_bdbf_5255,
    0x028b_2384_de4a,
    0x028d_13ee_805b,
    0x0290_35e9_221f,
    0x0292_9645_3882,
    0x0296_99bd_fb61,
    0x0299_02a3_7aab,
    0x029c_54b8_64c9,
    0x029d_eabd_1083,
    0x02a2_0f9c_0bb5,
    0x02a4_c760_5d61,
    0x02a7_bdbf_5255,
    0x02a9_6056_dafc,
    0x02ac_3daf_14ef,
    0x02af_1b01_9eca,
    0x02b2_9645_3882,
    0x02b5_d022_d80f,
    0x02b8_fa47_1cb3,
    0x02ba_9012_e713,
    0x02bd_6d49_01cc,
    0x02c0_4a79_6cf6,
    0x02c3_27a4_28a6,
    0x02c6_1a5e_8f4c,
    0x02c8_e1e8_91f6,
    0x02cb_bf02_3fc2,
    0x02ce_9c16_3e6e,
    0x02d1_7924_8e13,
    0x02d4_562d_2ec6,
    0x02d7_3330_209d,
    0x02da_102d_63b0,
    0x02dc_ed24_f814,
];

/// Returns 2^44 times the binary logarithm of `x + 1`, for `x` below 2^16.
pub(super) fn ln(x: u32) -> u64 {
    let mut x = u64::from(x) + 1;
    let mut exponent = 15;
    if x & 0x1_8000 == 0 {
        let bits = ((x & 0x1_ffff) as u32).leading_zeros() - 16;
        x <<= bits;
        exponent -= u64::from(bits);
    }
    let (reciprocal, log) = COARSE[(x >> 8) as usize - 128];
    let fine = FINE[(((u128::from(x) * u128::from(reciprocal)) >> 48) & 0xff) as usize];
    (exponent << 44) + ((log + fine) >> 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_near_what_they_stand_for() {
        assert_eq!(COARSE[1], (0xfe03_f80f_e040, 0x2df_ca16_dde1));
        assert_eq!(COARSE[128], (0x8000_0000_0000, 0xffff_0000_0000));
        for x in 0..0x1_0000u32 {
            let exact = f64::from(x + 1).log2() * (1u64 << 44) as f64;
            assert!((ln(x) as f64 - exact).abs() < (1u64 << 32) as f64, "{x}");
        }
        assert_eq!(ln(0), 0);
    }

    #[test]
    fn squares() {
        let two = 2u128 << 120;
        assert_eq!(square(1 << 120, 120), 1 << 120);
        assert_eq!(square(3 << 119, 120), 9 << 118);
        assert_eq!(square(two - 1, 120), (4u128 << 120) - 4);
    }
}
