//! Fills the places of a plan: bf16 as it is, types with a kernel as the file has them, all others by way of the host.

use engine::LoadProgress;
use model_files::gguf::{GgmlType, Tensor};

use super::Weights;
use super::host::rows_to_bf16;
use super::plan::{WEIGHT_BYTES, WeightsPlan};
use super::stage::{Loading, STAGE_BYTES, Stage};
use crate::error::WorkError;
use crate::kernels::calls::Dequantise;

/// How a type becomes bf16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    AsItIs,
    OnDevice,
    OnHost,
}

impl Way {
    fn of(kind: GgmlType, elements_max: usize, elements: usize) -> Self {
        match (kind, Dequantise::kernel(kind)) {
            (GgmlType::BF16, _) => Way::AsItIs,
            (_, Some(_)) if elements <= elements_max => Way::OnDevice,
            _ => Way::OnHost,
        }
    }
}

/// Copies the weights to the device, tensor by tensor, and waits for the last one.
pub(crate) fn load(
    plan: WeightsPlan<'_>,
    on: Loading<'_>,
    progress: &mut dyn FnMut(LoadProgress),
) -> Result<Weights, WorkError> {
    let memory = on.device.allocate(plan.bytes())?;
    let base = memory.ptr();
    let mut stage = Stage::new(on)?;
    for (place, bytes) in &plan.vectors {
        let pieces = (0..).step_by(STAGE_BYTES).zip(bytes.chunks(STAGE_BYTES));
        for (at, piece) in pieces {
            stage.send(place.behind(at).of(base), piece.len(), |staged| {
                staged.copy_from_slice(piece)
            })?;
        }
    }
    let total_bytes: u64 = plan.parts.iter().map(|part| bf16_bytes(&part.tensor)).sum();
    let mut done_bytes = 0;
    for part in &plan.parts {
        send(&mut stage, &part.tensor, part.to.of(base))?;
        done_bytes += bf16_bytes(&part.tensor);
        progress(LoadProgress {
            done_bytes,
            total_bytes,
        });
    }
    stage.finish()?;
    Ok(Weights {
        memory,
        table: plan.table,
    })
}

fn bf16_bytes(tensor: &Tensor<'_>) -> u64 {
    (tensor.element_count() * WEIGHT_BYTES) as u64
}

/// Some rows at a time, as many as fit the staging memory.
fn send(stage: &mut Stage<'_>, tensor: &Tensor<'_>, to: cuda::DevicePtr) -> Result<(), WorkError> {
    let (elements, kind) = (tensor.row_elements(), tensor.kind);
    let row_bytes = elements * WEIGHT_BYTES;
    let file_row_bytes = elements / kind.block_elements() * kind.block_bytes();
    let way = Way::of(kind, stage.elements_max(), tensor.element_count());
    let staged_row_bytes = match way {
        Way::AsItIs | Way::OnHost => row_bytes,
        Way::OnDevice => file_row_bytes,
    };
    let rows_at_once = (STAGE_BYTES / staged_row_bytes.max(1)).max(1);
    let rows = tensor.rows();
    for first in (0..rows).step_by(rows_at_once) {
        let count = rows_at_once.min(rows - first);
        let to = to.offset(first * row_bytes);
        let raw = &tensor.bytes[first * file_row_bytes..][..count * file_row_bytes];
        match way {
            Way::AsItIs => stage.send(to, raw.len(), |staged| staged.copy_from_slice(raw))?,
            Way::OnDevice => stage.expand(to, raw, (kind, count * elements))?,
            Way::OnHost => stage.send(to, count * row_bytes, |staged| rows_to_bf16(tensor, first, staged))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k_quants_become_bf16_on_the_host_and_bf16_stays_as_it_is() {
        let of = |kind| Way::of(kind, usize::MAX, 1 << 30);
        assert_eq!(of(GgmlType::BF16), Way::AsItIs);
        for kind in [GgmlType::Q4_K, GgmlType::Q5_K, GgmlType::Q6_K, GgmlType::Q5_1] {
            assert_eq!(of(kind), Way::OnHost);
        }
        for kind in [GgmlType::Q4_0, GgmlType::Q8_0, GgmlType::F16, GgmlType::F32] {
            assert_eq!(of(kind), Way::OnDevice);
        }
    }
}
