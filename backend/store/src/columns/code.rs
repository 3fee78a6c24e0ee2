//! Redundancy of a line: copies, or the parity of a Reed-Solomon code.

use forebay_accel::erasure::{Code, Construction, ErasureDecoder};
use forebay_block::{Error, ErrorKind, Result};

/// Redundancy of lines of k data and m parity blocks.
pub enum RowCode {
    /// No parity: striping.
    Striped,
    /// One data column, and copies of it.
    Mirrored,
    /// Parity columns.
    Coded(Box<ErasureDecoder>),
}

impl RowCode {
    /// Returns the code for `data` and `parity` columns.
    ///
    /// # Errors
    /// `Invalid` for a number of columns that no code has.
    pub fn new(data: usize, parity: usize) -> Result<Self> {
        match (data, parity) {
            (_, 0) => Ok(Self::Striped),
            (1, _) => Ok(Self::Mirrored),
            _ => match Code::new(Construction::Cauchy, data, parity) {
                Ok(code) => Ok(Self::Coded(Box::new(ErasureDecoder::new(code)))),
                Err(error) => Err(Error::new(ErrorKind::Invalid, error.to_string())),
            },
        }
    }

    /// Computes the parity columns of data columns that are given in parts, all of one length. Columns of a mirror are copied by
    /// the caller.
    pub fn encode(&self, data: &[&[&[u8]]], parity: &mut [&mut [u8]]) {
        match self {
            Self::Striped => {}
            Self::Mirrored => {
                for copy in parity {
                    let mut at = 0;
                    for part in data[0] {
                        copy[at..at + part.len()].copy_from_slice(part);
                        at += part.len();
                    }
                }
            }
            Self::Coded(decoder) => {
                let mut outputs: Vec<[&mut [u8]; 1]> = parity.iter_mut().map(|column| [&mut **column]).collect();
                let mut outputs: Vec<&mut [&mut [u8]]> = outputs.iter_mut().map(|parts| &mut parts[..]).collect();
                let encoded = decoder.code().encode_parts(data, &mut outputs);
                encoded.expect("columns of one length, as many as the code has");
            }
        }
    }

    /// Computes the column `want` from k other columns, given with their numbers: data columns first, then parity.
    /// Returns false if they do not suffice.
    pub fn rebuild(&mut self, have: &[(usize, &[u8])], want: usize, out: &mut [u8]) -> bool {
        self.rebuild_all(have, &mut [(want, out)])
    }

    /// Computes several columns like [`rebuild`](Self::rebuild), each with its number.
    pub fn rebuild_all(&mut self, have: &[(usize, &[u8])], want: &mut [(usize, &mut [u8])]) -> bool {
        match self {
            Self::Striped => false,
            Self::Mirrored => match have.first() {
                Some((_, copy)) => {
                    want.iter_mut().for_each(|(_, out)| out.copy_from_slice(copy));
                    true
                }
                None => false,
            },
            Self::Coded(decoder) => decoder.rebuild(have, want).is_ok(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_column_is_rebuilt_from_any_k_others(
            data in 1usize..6,
            parity in 1usize..4,
            seed in any::<u64>(),
            skip in any::<u64>(),
        ) {
            let mut code = RowCode::new(data, parity).expect("a code");
            let column = |i: usize| -> Vec<u8> {
                (0..64u64).map(|at| (seed.wrapping_mul(at + 1 + 97 * i as u64) >> 11) as u8).collect()
            };
            let mut columns: Vec<Vec<u8>> = (0..data).map(column).collect();
            let mut made = vec![vec![0; 64]; parity];
            {
                // Cut differently in each column.
                let cut: Vec<[&[u8]; 2]> =
                    columns.iter().enumerate().map(|(i, bytes)| [&bytes[..8 * i], &bytes[8 * i..]]).collect();
                let parts: Vec<&[&[u8]]> = cut.iter().map(|parts| &parts[..]).collect();
                let mut outputs: Vec<&mut [u8]> = made.iter_mut().map(|column| &mut column[..]).collect();
                code.encode(&parts, &mut outputs);
            }
            columns.extend(made);
            for want in 0..columns.len() {
                let mut others: Vec<usize> = (0..columns.len()).filter(|&i| i != want).collect();
                let turn = (skip % others.len() as u64) as usize;
                others.rotate_left(turn);
                let have: Vec<(usize, &[u8])> = others[..data].iter().map(|&i| (i, &columns[i][..])).collect();
                let mut out = vec![0; 64];
                prop_assert!(code.rebuild(&have, want, &mut out));
                prop_assert_eq!(&out, &columns[want]);
            }
        }
    }

    #[test]
    fn codes_that_do_not_exist_are_rejected() {
        assert!(RowCode::new(3, 17).is_err());
        assert!(matches!(RowCode::new(3, 0), Ok(RowCode::Striped)));
        let mut striped = RowCode::new(3, 0).expect("striping");
        assert!(!striped.rebuild(&[], 0, &mut [0; 8]));
    }
}
