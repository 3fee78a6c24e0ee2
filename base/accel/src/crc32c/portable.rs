//! CRC32C by tables, sixteen bytes a step.

use super::polynomial::POLYNOMIAL;

/// Tables of registers: `TABLES[n][byte]` is that after a byte that is followed by `n` bytes of zero.
static TABLES: [[u32; 256]; 16] = {
    let mut tables = [[0; 256]; 16];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = (crc >> 1) ^ (POLYNOMIAL & 0u32.wrapping_sub(crc & 1));
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 16 {
        let mut byte = 0;
        while byte < 256 {
            let crc = tables[table - 1][byte];
            tables[table][byte] = (crc >> 8) ^ tables[0][(crc & 0xFF) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
};

/// Returns the register after `data`.
pub(crate) fn update(mut state: u32, data: &[u8]) -> u32 {
    let (blocks, rest) = data.as_chunks::<16>();
    for block in blocks {
        let first = state.to_le_bytes();
        let mut next = 0;
        for (at, &byte) in block.iter().enumerate() {
            let byte = if at < 4 { byte ^ first[at] } else { byte };
            next ^= TABLES[15 - at][usize::from(byte)];
        }
        state = next;
    }
    for &byte in rest {
        state = (state >> 8) ^ TABLES[0][usize::from(state as u8 ^ byte)];
    }
    state
}
