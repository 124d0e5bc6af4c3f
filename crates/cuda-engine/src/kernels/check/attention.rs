//! Checks of both kernels of attention. Places of the pool that no token was written to hold NaN.

use half::bf16;

use super::data::{bf16_bytes, bf16_values, f32_bytes, u32_bytes, wide};
use super::paged::{OnDevice, Paged};
use super::{Limit, Run};
use crate::kernels::calls::{DecodeAttention, PrefillAttention, RowTile};
use crate::kernels::compile::KernelError;
use crate::kernels::driver::DeviceMemory;
use crate::kernels::reference::{Scores, attend};
use crate::kernels::shapes::{AttentionCase, DECODE, PREFILL, ScoreSize};
use crate::kernels::table::KernelId;
use crate::kernels::{PADDING_ROW, TILE_ROWS};

/// A result is a mean of values of about one. The weights of the mean are rounded to bf16 before the tensor core multiplies
/// them: at most 2^-8 of each, of either sign, and the result is rounded once more.
const PREFILL_LIMIT: Limit = Limit {
    absolute: 4e-3,
    relative: 4e-3,
    nmse: 2e-5,
};
/// Only the result is rounded; scores of 200 have an error of 2^-16 in f32.
const DECODE_LIMIT: Limit = Limit {
    absolute: 2e-4,
    relative: 4.4e-3,
    nmse: 5e-6,
};

/// A filled pool, queries, and what the host makes of them.
struct Prepared {
    paged: Paged,
    device: OnDevice,
    queries: DeviceMemory,
    /// `[row][head][head dim]`; zeros for the padding row.
    want: Vec<f64>,
    scale: f32,
}

fn prepare(run: &mut Run<'_, '_>, case: AttentionCase) -> Result<Prepared, KernelError> {
    let case = run.attention_case(case);
    let mut paged = Paged::new(run, case, f32::NAN);
    let head_dim = case.head_dim;
    let is_large = case.scores == ScoreSize::Large;
    for (sequence, (prefix, rows)) in case.sequences.iter().enumerate() {
        for position in 0..(prefix + rows) as usize {
            for kv_head in 0..case.kv_heads {
                let mut keys = run.random.bf16s(head_dim);
                if is_large {
                    keys[0] = 8.0;
                }
                let values = run.random.bf16s(head_dim);
                paged.write((sequence, position), (kv_head, false), &keys);
                paged.write((sequence, position), (kv_head, true), &values);
            }
        }
    }
    let (rows, heads) = (paged.row_sequence.len(), paged.heads());
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut queries = run.random.bf16s(rows * heads * head_dim);
    if is_large {
        // A score of 200 through the first value alone, which bf16 has nearly.
        let first = bf16::from_f32(25.0 / scale).to_f32();
        for (head, query) in queries.chunks_exact_mut(head_dim).enumerate() {
            query[0] = if head % heads % 2 == 0 { first } else { -first };
        }
    }
    let scores = Scores {
        scale: scale.into(),
        softcap: case.softcap.map(f64::from),
        window: case.window,
    };
    let mut want = vec![0.0; queries.len()];
    for row in (0..rows).filter(|row| paged.row_sequence[*row] != PADDING_ROW) {
        let tokens = (paged.row_sequence[row] as usize, paged.row_position[row] as usize + 1);
        for kv_head in 0..case.kv_heads {
            let (keys, values) = (paged.read(tokens, kv_head, false), paged.read(tokens, kv_head, true));
            for head in kv_head * case.group..(kv_head + 1) * case.group {
                let at = (row * heads + head) * head_dim;
                let result = attend(&wide(&queries[at..at + head_dim]), &keys, &values, scores);
                want[at..at + head_dim].copy_from_slice(&result);
            }
        }
    }
    Ok(Prepared {
        device: paged.upload(run)?,
        paged,
        queries: run.upload(&bf16_bytes(&queries))?,
        want,
        scale,
    })
}

pub(super) fn check_prefill(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    for case in run.shapes(&PREFILL) {
        let prepared = prepare(run, case)?;
        let whole = prefill(run, &prepared, TILE_ROWS)?;
        let label = prepared.paged.label();
        let of = (KernelId::PrefillAttention, label.clone());
        run.compare(of, &bf16_values(&whole), &prepared.want, PREFILL_LIMIT);
        // The same rows in other company.
        let parts = prefill(run, &prepared, 5)?;
        run.same(
            (KernelId::PrefillAttention, format!("{label}: bits in small tiles")),
            &parts,
            &whole,
        );
    }
    Ok(())
}

fn prefill(run: &mut Run<'_, '_>, prepared: &Prepared, tile_rows: u32) -> Result<Vec<u8>, KernelError> {
    let Prepared { paged, device, .. } = prepared;
    let mut tiles = Vec::new();
    let mut first_row = 0;
    for (sequence, (prefix, rows)) in (0u32..).zip(paged.case.sequences) {
        for from in (0..*rows).step_by(tile_rows as usize) {
            tiles.push(RowTile {
                first_row: first_row + from,
                rows: (rows - from).min(tile_rows),
                sequence,
                first_position: prefix + from,
            });
        }
        first_row += rows;
    }
    // Steps that are launched as a graph have places that no rows fill.
    tiles.push(RowTile {
        first_row: 0,
        rows: 0,
        sequence: 0,
        first_position: 0,
    });
    let tile_bytes: Vec<u8> = tiles.iter().flat_map(|tile| tile.to_bytes()).collect();
    let device_tiles = run.upload(&tile_bytes)?;
    // No tile has the padding row, which stays zero.
    let out = run.upload(&bf16_bytes(&vec![0.0; prepared.want.len()]))?;
    let call = PrefillAttention {
        shape: paged.shape,
        queries: prepared.queries.ptr(),
        out: out.ptr(),
        tiles: device_tiles.ptr(),
        tile_count: tiles.len() as u32,
        kv: paged.kv(device),
        window: paged.case.window,
        scale: prepared.scale,
        softcap: paged.case.softcap,
    };
    run.bench.launch(paged.shape, &call.call()?)?;
    run.bench.download(&out)
}

pub(super) fn check_decode(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    for case in run.shapes(&DECODE) {
        let prepared = prepare(run, case)?;
        let mut rows: Vec<u32> = (0..prepared.paged.row_sequence.len() as u32).collect();
        run.random.shuffle(&mut rows);
        let together = decode(run, &prepared, &[&rows[..]])?;
        let label = prepared.paged.label();
        let of = (KernelId::DecodeAttention, label.clone());
        run.compare(of, &bf16_values(&together), &prepared.want, DECODE_LIMIT);
        let each: Vec<&[u32]> = rows.chunks(1).collect();
        let alone = decode(run, &prepared, &each)?;
        let of = (KernelId::DecodeCombine, format!("{label}: bits of rows alone"));
        run.same(of, &alone, &together);
    }
    Ok(())
}

/// One pair of launches for each batch of rows.
fn decode(run: &mut Run<'_, '_>, prepared: &Prepared, batches: &[&[u32]]) -> Result<Vec<u8>, KernelError> {
    let Prepared { paged, device, .. } = prepared;
    let out = run.upload(&bf16_bytes(&vec![f32::NAN; prepared.want.len()]))?;
    for batch in batches {
        let positions = batch.iter().map(|row| paged.row_position[*row as usize]);
        let splits = DecodeAttention::splits_for(positions.max().unwrap_or(0) + 1);
        let sizes = (batch.len() as u32, paged.case.kv_heads as u32);
        let (out_bytes, state_bytes) = DecodeAttention::scratch_bytes(paged.shape, sizes, splits);
        let part_out = run.upload(&f32_bytes(&vec![f32::NAN; out_bytes / 4]))?;
        let part_state = run.upload(&f32_bytes(&vec![f32::NAN; state_bytes / 4]))?;
        let device_rows = run.upload(&u32_bytes(batch))?;
        let call = DecodeAttention {
            shape: paged.shape,
            queries: prepared.queries.ptr(),
            out: out.ptr(),
            rows: device_rows.ptr(),
            row_count: batch.len() as u32,
            splits,
            part_out: part_out.ptr(),
            part_state: part_state.ptr(),
            kv: paged.kv(device),
            window: paged.case.window,
            scale: prepared.scale,
            softcap: paged.case.softcap,
        };
        for call in call.calls()? {
            run.bench.launch(paged.shape, &call)?;
        }
        // The scratch memory must live until the kernels have used it.
        run.bench.download(&out)?;
    }
    run.bench.download(&out)
}
