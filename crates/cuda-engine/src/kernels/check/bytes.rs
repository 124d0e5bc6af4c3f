//! Checks of copies, hashes and dequantisation: every bit.

use engine::{KvDtype, KvGeometry, KvMemory};
use half::{bf16, f16};
use model_files::gguf::{GgmlType, Tensor, dequantise_row};
use serving_core::ids::BlockId;

use super::Run;
use super::data::{u32_bytes, u64_bytes};
use crate::kernels::calls::{CopyBlocks, Dequantise, HashBlocks, Pieces};
use crate::kernels::compile::KernelError;
use crate::kernels::table::KernelId;

pub(super) fn check(run: &mut Run<'_, '_>) -> Result<(), KernelError> {
    for kind in GgmlType::ALL {
        dequantise(run, kind)?;
    }
    // Less than a turn of a block's threads, several parts with a rest, and more than one turn of all parts.
    for piece_bytes in run.shapes(&[6_144u64, 48, 20_496, 266_304]) {
        copies(run, piece_bytes)?;
    }
    for layers in run.shapes(&[3u32, 1, 12]) {
        hash(run, layers)?;
    }
    Ok(())
}

/// Random blocks of a type whose scales are ordinary numbers.
fn weights(run: &mut Run<'_, '_>, kind: GgmlType, blocks: usize) -> Vec<u8> {
    let halves = match kind {
        GgmlType::Q4_1 => 2,
        GgmlType::F32 => 0,
        _ => 1,
    };
    let mut bytes = Vec::new();
    for _ in 0..blocks {
        if kind == GgmlType::F32 {
            bytes.extend(run.random.normal().to_le_bytes());
            continue;
        }
        let scales: Vec<f32> = run.random.normals(halves);
        bytes.extend(scales.iter().flat_map(|scale| f16::from_f32(*scale).to_le_bytes()));
        bytes.extend((2 * halves..kind.block_bytes()).map(|_| run.random.bits() as u8));
    }
    bytes
}

fn dequantise(run: &mut Run<'_, '_>, kind: GgmlType) -> Result<(), KernelError> {
    let Some(kernel) = Dequantise::kernel(kind) else {
        return Ok(());
    };
    // Not a whole number of blocks of threads.
    let blocks = 37;
    let bytes = weights(run, kind, blocks);
    let elements = blocks * kind.block_elements();
    let dims = [elements as u64];
    let tensor = Tensor {
        name: "weights",
        kind,
        dims: &dims,
        bytes: &bytes,
    };
    let mut values = vec![0.0; elements];
    dequantise_row(&tensor, 0, &mut values);
    let want: Vec<u8> = values
        .iter()
        .flat_map(|value| bf16::from_f32(*value).to_le_bytes())
        .collect();
    let (from, out) = (run.upload(&bytes)?, run.upload(&vec![0xff; want.len()])?);
    let call = Dequantise {
        from: from.ptr(),
        out: out.ptr(),
        elements: elements as u64,
    };
    if let Some(call) = call.call(kind)? {
        let got = run.result(&call, &out)?;
        run.same((kernel, format!("{blocks} blocks")), &got, &want);
    }
    Ok(())
}

fn copies(run: &mut Run<'_, '_>, piece_bytes: u64) -> Result<(), KernelError> {
    let size = piece_bytes as usize;
    let pool: Vec<u8> = (0..7 * size).map(|_| run.random.bits() as u8).collect();
    let label = format!("pieces of {piece_bytes} bytes");
    let piece = |index: usize| index * size..(index + 1) * size;
    let wanted = [5usize, 0, 3];
    let offsets: Vec<u64> = wanted.iter().map(|index| *index as u64 * piece_bytes).collect();
    let (device_pool, device_offsets) = (run.upload(&pool)?, run.upload(&u64_bytes(&offsets))?);
    let pieces = Pieces {
        pool: device_pool.ptr(),
        offsets: device_offsets.ptr(),
        count: 3,
        piece_bytes,
    };
    let packed = run.upload(&vec![0xff; 3 * size])?;
    let got = run.result(&pieces.gather(packed.ptr())?, &packed)?;
    let gathered: Vec<u8> = wanted.iter().flat_map(|index| pool[piece(*index)].to_vec()).collect();
    run.same((KernelId::GatherBlocks, label.clone()), &got, &gathered);

    let mut want = pool;
    let fresh: Vec<u8> = (0..3 * size).map(|_| run.random.bits() as u8).collect();
    for (index, bytes) in wanted.iter().zip(fresh.chunks_exact(size)) {
        want[piece(*index)].copy_from_slice(bytes);
    }
    let packed = run.upload(&fresh)?;
    let got = run.result(&pieces.scatter(packed.ptr())?, &device_pool)?;
    run.same((KernelId::ScatterBlocks, label.clone()), &got, &want);

    let pairs = [(5usize, 1usize), (0, 6)];
    let flat: Vec<u64> = pairs
        .iter()
        .flat_map(|(from, to)| [*from as u64 * piece_bytes, *to as u64 * piece_bytes])
        .collect();
    let device_pairs = run.upload(&u64_bytes(&flat))?;
    for (from, to) in pairs {
        want.copy_within(piece(from), to * size);
    }
    let copy = CopyBlocks {
        pool: device_pool.ptr(),
        pairs: device_pairs.ptr(),
        count: 2,
        piece_bytes,
    };
    let got = run.result(&copy.call()?, &device_pool)?;
    run.same((KernelId::CopyBlocks, label.clone()), &got, &want);

    for index in wanted {
        want[piece(index)].fill(0);
    }
    let got = run.result(&pieces.zero()?, &device_pool)?;
    run.same((KernelId::ZeroBlocks, label), &got, &want);
    Ok(())
}

fn hash(run: &mut Run<'_, '_>, layers: u32) -> Result<(), KernelError> {
    let geometry = KvGeometry {
        layer_count: layers,
        kv_head_count: 3,
        head_dim: 64,
        block_tokens: 16,
        // Any type of two bytes has the rows of bf16.
        dtype: KvDtype::F16,
    };
    let valid = [1u32, 16, 7, 15];
    let count = valid.len();
    let block_bytes = geometry.block_bytes();
    let pool: Vec<u8> = (0..count * block_bytes).map(|_| run.random.bits() as u8).collect();
    let want: Vec<u64> = host_hashes(geometry, &pool, &valid);
    let offsets: Vec<u64> = (0..count).map(|block| (block * block_bytes) as u64).collect();
    let (device_pool, device_offsets) = (run.upload(&pool)?, run.upload(&u64_bytes(&offsets))?);
    let (device_valid, out) = (run.upload(&u32_bytes(&valid))?, run.upload(&vec![0; 8 * count])?);
    let call = HashBlocks {
        pool: device_pool.ptr(),
        offsets: device_offsets.ptr(),
        valid_tokens: device_valid.ptr(),
        out: out.ptr(),
        count: count as u32,
        slices: layers * 2 * geometry.kv_head_count,
        block_tokens: geometry.block_tokens,
        row_bytes: geometry.row_bytes() as u32,
    };
    let got = run.result(&call.call()?, &out)?;
    run.same(
        (KernelId::HashBlocks, format!("{layers} layers")),
        &got,
        &u64_bytes(&want),
    );
    Ok(())
}

/// The hashes by the definition of the host. Empty when the host has no memory for them, which no result equals.
fn host_hashes(geometry: KvGeometry, pool: &[u8], valid: &[u32]) -> Vec<u64> {
    let Ok(memory) = KvMemory::new(geometry, valid.len() as u32) else {
        return Vec::new();
    };
    let blocks = pool.chunks_exact(geometry.block_bytes()).zip(valid).zip(0..);
    let hash = |((bytes, valid), block): ((&[u8], &u32), u32)| {
        memory.import_block(BlockId(block), bytes).ok()?;
        memory.block_hash(BlockId(block), *valid).ok()
    };
    blocks.map_while(hash).collect()
}
