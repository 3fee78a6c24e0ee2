//! Generator matrices, and what becomes of them when chunks are lost.
//!
//! Generator matrices have `k + m` rows of `k` coefficients; the first `k` rows are the identity, the others make
//! parity.  The constructions give the bytes of ISA-L and jerasure, so that what one library wrote another can read.

use super::gf::{invert, multiply};

/// Construction of the coefficients of the parity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Construction {
    /// Matrix of ISA-L's `gf_gen_rs_matrix`, Ceph's `plugin=isa technique=reed_sol_van`: row `i` holds the powers of
    /// 2^i.
    ///
    /// The first row of parity is a plain sum.  Not every square part of a matrix with four rows or more can be
    /// inverted, so some losses of `m` chunks are beyond repair when `m` is 4 and `k` more than 21, or `m` more than 4
    /// (ISA-L gives the same limits).  New pools with so much parity take [`Construction::Cauchy`].
    Vandermonde,
    /// Matrix of ISA-L's `gf_gen_cauchy1_matrix`, Ceph's `plugin=isa technique=cauchy`: 1 / (i xor j).  Any `m` losses
    /// can be repaired.
    Cauchy,
    /// Matrix of jerasure's `reed_sol_van` with w=8, Ceph's `plugin=jerasure technique=reed_sol_van`: an extended
    /// Vandermonde matrix made systematic by column operations, then scaled so that the first row and the first column
    /// are ones. Any `m` losses can be repaired.
    JerasureVandermonde,
}

/// Returns the rows of the generator that make parity: `m` rows of `k` coefficients.
pub(crate) fn parity_rows(construction: Construction, k: usize, m: usize) -> Vec<u8> {
    match construction {
        Construction::Vandermonde => vandermonde(k, m),
        Construction::Cauchy => (k..k + m)
            .flat_map(|i| (0..k).map(move |j| invert(u8::try_from(i ^ j).expect("at most 48 chunks"))))
            .collect(),
        Construction::JerasureVandermonde => jerasure_vandermonde(k, m),
    }
}

fn vandermonde(k: usize, m: usize) -> Vec<u8> {
    let mut rows = Vec::with_capacity(k * m);
    let mut base = 1;
    for _ in 0..m {
        let mut power = 1;
        for _ in 0..k {
            rows.push(power);
            power = multiply(power, base);
        }
        base = multiply(base, 2);
    }
    rows
}

fn jerasure_vandermonde(k: usize, m: usize) -> Vec<u8> {
    let rows = k + m;
    // Extended Vandermonde matrix: powers of 0, 1, 2, ... and a last row that is zero except for its last element.
    let mut matrix = vec![0u8; rows * k];
    for (i, row) in matrix.chunks_exact_mut(k).enumerate() {
        if i + 1 == rows {
            row[k - 1] = 1;
            continue;
        }
        let mut power = 1;
        for entry in row {
            *entry = power;
            power = multiply(power, i as u8);
        }
    }
    // Column operations turn the upper square into the identity; they change no solution space.
    for i in 1..k {
        let pivot = (i..rows).find(|&row| matrix[row * k + i] != 0).expect("the columns are independent");
        if pivot != i {
            for column in 0..k {
                matrix.swap(pivot * k + column, i * k + column);
            }
        }
        let scale = invert(matrix[i * k + i]);
        for row in 0..rows {
            matrix[row * k + i] = multiply(matrix[row * k + i], scale);
        }
        for column in (0..k).filter(|&column| column != i) {
            let factor = matrix[i * k + column];
            for row in 0..rows {
                matrix[row * k + column] ^= multiply(factor, matrix[row * k + i]);
            }
        }
    }
    let mut parity = matrix.split_off(k * k);
    // Scaling a column (that is, a data chunk's weight) and then a row keeps every square part invertible.
    for column in 0..k {
        let scale = invert(parity[column]);
        for row in parity.chunks_exact_mut(k) {
            row[column] = multiply(row[column], scale);
        }
    }
    for row in parity.chunks_exact_mut(k).skip(1) {
        let scale = invert(row[0]);
        row.iter_mut().for_each(|entry| *entry = multiply(*entry, scale));
    }
    parity
}

/// Returns one row of the generator, data or parity.
pub(crate) fn generator_row(parity: &[u8], k: usize, chunk: usize) -> Vec<u8> {
    if chunk < k {
        (0..k).map(|column| u8::from(column == chunk)).collect()
    } else {
        parity[(chunk - k) * k..(chunk - k + 1) * k].to_vec()
    }
}

/// Chooses, of the chunks `have` in their order, the first `k` from which everything can be computed.
pub(crate) fn choose(parity: &[u8], k: usize, have: impl Iterator<Item = usize>) -> Option<Vec<usize>> {
    let mut chosen = Vec::with_capacity(k);
    // Rows already chosen, reduced; each with its leading column, where all later ones are zero.
    let mut echelon: Vec<(usize, Vec<u8>)> = Vec::with_capacity(k);
    for chunk in have {
        let mut row = generator_row(parity, k, chunk);
        for (lead, reduced) in &echelon {
            let factor = row[*lead];
            add_multiple(&mut row, reduced, factor);
        }
        let Some(lead) = row.iter().position(|&entry| entry != 0) else { continue };
        let scale = invert(row[lead]);
        row.iter_mut().for_each(|entry| *entry = multiply(*entry, scale));
        echelon.push((lead, row));
        chosen.push(chunk);
        if chosen.len() == k {
            return Some(chosen);
        }
    }
    None
}

/// Returns the coefficients that make the chunks `want` of the chunks `chosen`: a row of `k` for each wanted chunk.
///
/// `None` where the rows of `chosen` are not independent.
pub(crate) fn recovery_rows(parity: &[u8], k: usize, chosen: &[usize], want: &[usize]) -> Option<Vec<u8>> {
    let square: Vec<u8> = chosen.iter().flat_map(|&chunk| generator_row(parity, k, chunk)).collect();
    let inverse = inverse(square, k)?;
    let mut rows = Vec::with_capacity(want.len() * k);
    for &chunk in want {
        let mut row = vec![0; k];
        for (column, factor) in generator_row(parity, k, chunk).into_iter().enumerate() {
            add_multiple(&mut row, &inverse[column * k..(column + 1) * k], factor);
        }
        rows.extend(row);
    }
    Some(rows)
}

/// Returns the inverse of a square matrix of `n` rows, by Gauss and Jordan.
fn inverse(mut matrix: Vec<u8>, n: usize) -> Option<Vec<u8>> {
    let mut result: Vec<u8> = (0..n * n).map(|at| u8::from(at / n == at % n)).collect();
    for column in 0..n {
        let pivot = (column..n).find(|&row| matrix[row * n + column] != 0)?;
        let scale = invert(matrix[pivot * n + column]);
        for side in [&mut matrix, &mut result] {
            for at in 0..n {
                side.swap(pivot * n + at, column * n + at);
                side[column * n + at] = multiply(side[column * n + at], scale);
            }
        }
        for row in (0..n).filter(|&row| row != column) {
            let factor = matrix[row * n + column];
            for side in [&mut matrix, &mut result] {
                let source = side[column * n..(column + 1) * n].to_vec();
                add_multiple(&mut side[row * n..(row + 1) * n], &source, factor);
            }
        }
    }
    Some(result)
}

fn add_multiple(row: &mut [u8], other: &[u8], factor: u8) {
    for (entry, &value) in row.iter_mut().zip(other) {
        *entry ^= multiply(factor, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_matrices_are_those_of_the_libraries() {
        // Printed by ISA-L 2.30 (k=4, m=2 and 3) and by jerasure 2.0 (k=4, m=2); libisal and libjerasure themselves
        // are asked for every shape in test/peers.
        assert_eq!(parity_rows(Construction::Vandermonde, 4, 2), [1, 1, 1, 1, 1, 2, 4, 8]);
        assert_eq!(parity_rows(Construction::Cauchy, 4, 2), [71, 167, 122, 186, 167, 71, 186, 122]);
        assert_eq!(parity_rows(Construction::JerasureVandermonde, 4, 2), [1, 1, 1, 1, 1, 70, 143, 200]);
    }

    #[test]
    fn an_inverse_undoes_its_matrix() {
        for k in [2, 5, 32] {
            let parity = parity_rows(Construction::Cauchy, k, 16);
            let chosen: Vec<usize> = (16..16 + k).collect();
            let rows = recovery_rows(&parity, k, &chosen, &chosen).unwrap();
            for (at, &entry) in rows.iter().enumerate() {
                assert_eq!(entry, u8::from(at / k == at % k));
            }
        }
    }

    #[test]
    fn dependent_rows_are_passed_over() {
        // With powers of 1, 2, 4, ... 2^15 a square part of zero determinant exists from m = 5, k = 4 on at the latest.
        let (k, m) = (24, 6);
        let parity = parity_rows(Construction::Vandermonde, k, m);
        let everything = choose(&parity, k, 0..k + m).unwrap();
        assert_eq!(everything, (0..k).collect::<Vec<_>>());
        assert_eq!(choose(&parity, k, 0..k - 1), None);
        assert_eq!(recovery_rows(&parity, k, &vec![0; k], &[1]), None);
    }
}
