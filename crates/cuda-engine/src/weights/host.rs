//! Makes bf16 of weights on the host, for types that the device has no kernel for: K-quants and Q5_1.

use std::sync::{Mutex, PoisonError};

use half::bf16;
use model_files::gguf::{Tensor, dequantise_row};

use super::plan::WEIGHT_BYTES;

/// Threads that convert. The link to the device is full with about so many.
const THREADS_MAX: usize = 8;
/// Pieces for each thread, so that none waits long for the last.
const PIECES_PER_THREAD: usize = 4;

/// Rows from `first` on, as many as `out` holds. Each value is rounded to nearest even.
pub(super) fn rows_to_bf16(tensor: &Tensor<'_>, first: usize, out: &mut [u8]) {
    let row_bytes = tensor.row_elements() * WEIGHT_BYTES;
    let rows = out.len().checked_div(row_bytes).unwrap_or(0);
    if rows == 0 {
        return;
    }
    let threads = std::thread::available_parallelism()
        .map_or(1, usize::from)
        .min(THREADS_MAX);
    let piece_rows = rows.div_ceil(threads * PIECES_PER_THREAD);
    let pieces = Mutex::new(out.chunks_mut(piece_rows * row_bytes).enumerate());
    let convert = || {
        loop {
            // The lock is held only while a piece is taken.
            let piece = pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((index, piece)) = piece else { return };
            convert_rows(tensor, first + index * piece_rows, piece);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without a further thread the others do its work.
            let _ = std::thread::Builder::new().spawn_scoped(scope, convert);
        }
        convert();
    });
}

fn convert_rows(tensor: &Tensor<'_>, first: usize, out: &mut [u8]) {
    let mut values = vec![0.0_f32; tensor.row_elements()];
    for (row, out) in (first..).zip(out.chunks_exact_mut(values.len() * WEIGHT_BYTES)) {
        dequantise_row(tensor, row, &mut values);
        for (out, value) in out.chunks_exact_mut(WEIGHT_BYTES).zip(&values) {
            out.copy_from_slice(&bf16::from_f32(*value).to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use model_files::gguf::GgmlType;

    use super::*;

    #[test]
    fn every_row_comes_to_its_place_whatever_thread_converts_it() {
        let values: Vec<f32> = (0..100 * 8).map(|value| value as f32).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let tensor = Tensor {
            name: "t",
            kind: GgmlType::F32,
            dims: &[8, 100],
            bytes: &bytes,
        };
        let mut out = vec![0; 97 * 8 * WEIGHT_BYTES];
        rows_to_bf16(&tensor, 3, &mut out);
        let want: Vec<u8> = values[24..]
            .iter()
            .flat_map(|value| bf16::from_f32(*value).to_le_bytes())
            .collect();
        assert_eq!(out, want);
        rows_to_bf16(&tensor, 0, &mut []);
    }
}
