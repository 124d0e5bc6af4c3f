//! Checks of RoPE: angles, turned queries, and what is in the pool afterwards.

use half::bf16;

use super::data::{bf16_bytes, bf16_values, f32_bytes, f32_values, f64_bytes, u32_bytes, wide};
use super::paged::Paged;
use super::{Limit, Run};
use crate::kernels::PADDING_ROW;
use crate::kernels::calls::{RopeAngles, RopePairs, RopeWrite};
use crate::kernels::compile::KernelError;
use crate::kernels::driver::DeviceMemory;
use crate::kernels::reference;
use crate::kernels::shapes::{POSITIONS, ROPES, RopeCase};
use crate::kernels::table::KernelId;

const EPSILON: f32 = 1e-6;

pub(super) fn check(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    let speeds = speeds(32);
    let (out, want) = angles(run, &POSITIONS, &speeds)?;
    let got = run.bench.download(&out)?;
    let want: Vec<f64> = want
        .iter()
        .flatten()
        .flat_map(|(cosine, sine)| [*cosine, *sine])
        .collect();
    // Half a unit in the last place of f32, and what f64 loses at the largest position.
    let limit = Limit {
        absolute: 1e-7,
        relative: 0.0,
        nmse: 1e-13,
    };
    run.compare(
        (KernelId::RopeAngles, format!("positions {POSITIONS:?}")),
        &f32_values(&got),
        &want,
        limit,
    );
    for case in run.shapes(&ROPES) {
        write(run, case)?;
    }
    Ok(())
}

fn speeds(pairs: usize) -> Vec<f64> {
    (0..pairs)
        .map(|pair| 10_000f64.powf(-(pair as f64) / pairs as f64))
        .collect()
}

/// `[row][pair]`: cosine and sine.
type Turns = Vec<Vec<(f64, f64)>>;

/// Runs the kernel. Its result stays on the device; beside it what the host makes.
fn angles(run: &mut Run<'_, '_>, positions: &[u32], speeds: &[f64]) -> Result<(DeviceMemory, Turns), KernelError> {
    let turn = |position: u32, speed: f64| {
        let angle = f64::from(position) * speed;
        (angle.cos(), angle.sin())
    };
    let want = positions
        .iter()
        .map(|position| speeds.iter().map(|speed| turn(*position, *speed)).collect())
        .collect();
    let (device_positions, device_speeds) = (run.upload(&u32_bytes(positions))?, run.upload(&f64_bytes(speeds))?);
    let out = run.upload(&f32_bytes(&vec![f32::NAN; 2 * positions.len() * speeds.len()]))?;
    let call = RopeAngles {
        row_position: device_positions.ptr(),
        speeds: device_speeds.ptr(),
        angles: out.ptr(),
        rows: positions.len() as u32,
        pairs: speeds.len() as u32,
        magnitude: 1.0,
    };
    // The inputs must live until the kernel has read them.
    run.result(&call.call()?, &out)?;
    Ok((out, want))
}

impl RopeCase {
    fn kind(self) -> RopePairs {
        match self.is_halves {
            true => RopePairs::Halves,
            false => RopePairs::Neighbours,
        }
    }
}

fn write(run: &mut Run<'_, '_>, case: RopeCase) -> Result<(), KernelError> {
    let attention = run.attention_case(case.attention);
    let mut paged = Paged::new(run, attention, 7.0);
    let (heads, kv_heads, head_dim) = (paged.heads(), paged.case.kv_heads, paged.case.head_dim);
    let rows = paged.row_sequence.len();
    let all = heads + 2 * kv_heads;
    let qkv = run.random.normals(rows * all * head_dim);
    let norms = [run.random.normals(head_dim), run.random.normals(head_dim)];
    let kind = case.kind();
    let (device_angles, turns) = angles(run, &paged.row_position, &speeds(case.pairs))?;
    let device = paged.upload(run)?;

    let want_queries = want(&mut paged, case, (&qkv, &norms), &turns);

    let device_qkv = run.upload(&f32_bytes(&qkv))?;
    let device_norms = [run.upload(&f32_bytes(&norms[0]))?, run.upload(&f32_bytes(&norms[1]))?];
    let queries = run.upload(&bf16_bytes(&vec![0.0; want_queries.len()]))?;
    let call = RopeWrite {
        shape: paged.shape,
        qkv: device_qkv.ptr(),
        query_norm: case.has_norms.then(|| device_norms[0].ptr()),
        key_norm: case.has_norms.then(|| device_norms[1].ptr()),
        angles: device_angles.ptr(),
        queries: queries.ptr(),
        kv: paged.kv(&device),
        rows: rows as u32,
        rope_pairs: case.pairs as u32,
        kind,
        epsilon: EPSILON,
    };
    run.bench.launch(paged.shape, &call.call()?)?;
    let label = format!("{}, {} pairs, {kind:?}", paged.label(), case.pairs);
    let got = run.bench.download(&queries)?;
    run.compare(
        (KernelId::RopeWrite, format!("{label}: queries")),
        &bf16_values(&got),
        &want_queries,
        Limit::BF16,
    );
    let got = run.bench.download(&device.pool)?;
    let want: Vec<f64> = paged.pool.iter().map(|bits| bf16::from_bits(*bits).to_f64()).collect();
    // Both sides are rounded here, and a value between two may be rounded to either: a whole unit.
    let limit = Limit {
        relative: 8e-3,
        nmse: 1e-5,
        ..Limit::BF16
    };
    run.compare(
        (KernelId::RopeWrite, format!("{label}: pool")),
        &bf16_values(&got),
        &want,
        limit,
    );
    Ok(())
}

/// Turned queries by the host. Turned keys, and values, go into the host's pool.
fn want(
    paged: &mut Paged,
    case: RopeCase,
    (qkv, norms): (&[f32], &[Vec<f32>; 2]),
    turns: &[Vec<(f64, f64)>],
) -> Vec<f64> {
    let (heads, kv_heads, head_dim) = (paged.heads(), paged.case.kv_heads, paged.case.head_dim);
    let all = heads + 2 * kv_heads;
    let rows = paged.row_sequence.len();
    let mut want_queries = vec![0.0; rows * heads * head_dim];
    for row in 0..rows {
        if paged.row_sequence[row] == PADDING_ROW {
            continue;
        }
        let token = (paged.row_sequence[row] as usize, paged.row_position[row] as usize);
        for head in 0..all {
            let mut values = wide(&qkv[(row * all + head) * head_dim..][..head_dim]);
            let is_value = head >= heads + kv_heads;
            if !is_value {
                let norm = &norms[usize::from(head >= heads)];
                if case.has_norms {
                    values = reference::rms_norm(&values, &wide(norm), EPSILON.into());
                }
                reference::turn(&mut values, &turns[row], case.kind());
            }
            if head < heads {
                want_queries[(row * heads + head) * head_dim..][..head_dim].copy_from_slice(&values);
            } else {
                let kv_head = (head - heads) % kv_heads;
                let rounded: Vec<f32> = values.iter().map(|value| *value as f32).collect();
                paged.write(token, (kv_head, is_value), &rounded);
            }
        }
    }
    want_queries
}
