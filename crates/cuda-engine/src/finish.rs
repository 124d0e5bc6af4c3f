//! From a completed step to what it brought: tokens that the device drew, and rows whose logits come to the host, because
//! log-probabilities are asked for.

use cuda::{CudaError, Device, DevicePtr, Event, PinnedMemory, Stream};
use engine::for_devices::Draw;
use engine::{LogitsSink, Sampler, Step, StepOutput};
use serving_core::ids::ChoiceIndex;
use serving_core::scheduler::{SampledToken, SamplingFailed};

use crate::buffers::DRAWS_MAX;
use crate::error::{CudaEngineError, WorkError};
use crate::forward::Forward;
use crate::kernels::calls::{DRAWN_BYTES, Drawn};
use crate::step::{DrawnRow, Layout, LogitsPlan};
use crate::wait::Patience;

/// Rows of logits that come to the host at a time. 16 rows of a vocabulary of 128,256 are 8 MB of pinned memory.
const HOST_ROWS: usize = 16;
const LOGIT_BYTES: usize = size_of::<f32>();

/// The host's half of drawing.
#[derive(Debug)]
pub(crate) struct HostSide {
    /// The records that the device wrote.
    drawn: PinnedMemory,
    /// [`HOST_ROWS`] rows.
    logits: PinnedMemory,
    sampler: Sampler,
    /// One row of logits, which the sampler changes.
    row: Vec<f32>,
    /// One more, for prompts that several choices draw from.
    scratch: Vec<f32>,
}

/// A step that the host has waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ended<'a> {
    pub step: &'a Step,
    pub plan: &'a LogitsPlan,
    pub layout: &'a Layout,
    pub forward: &'a Forward,
    pub stream: &'a Stream,
    /// The step's end. It is recorded again behind logits that come to the host.
    pub end: &'a Event,
    pub patience: &'a Patience,
}

impl HostSide {
    pub(crate) fn new(device: &Device, vocab: u32) -> Result<Self, CudaEngineError> {
        let sampler = Sampler::new(vocab)?;
        let vocab = vocab as usize;
        Ok(Self {
            drawn: device.allocate_pinned(DRAWS_MAX * DRAWN_BYTES)?,
            logits: device.allocate_pinned(HOST_ROWS * vocab * LOGIT_BYTES)?,
            sampler,
            row: Vec::with_capacity(vocab),
            scratch: Vec::with_capacity(vocab),
        })
    }

    /// Gives the copy of the device's records to the stream.
    pub(crate) fn fetch_drawn(&self, stream: &Stream, from: DevicePtr, draws: usize) -> Result<(), CudaError> {
        stream.copy_to_host(&self.drawn, 0, from, draws * DRAWN_BYTES)
    }

    /// In the order of the step's draws, whoever drew them.
    pub(crate) fn output(&mut self, ended: Ended<'_>) -> Result<StepOutput, WorkError> {
        let drawn = self.read_drawn(ended.plan.draw_count())?;
        let mut output = StepOutput::default();
        let mut waiting = ended.plan.drawn.iter().peekable();
        let row_bytes = ended.forward.model.vocab as usize * LOGIT_BYTES;
        for (index, rows) in ended.plan.host.chunks(HOST_ROWS).enumerate() {
            let first = ended.plan.drawn.len() + index * HOST_ROWS;
            let Ended { forward, stream, .. } = ended;
            forward.logits(stream, ended.layout.logits_rows(first), rows.len() as u32)?;
            stream.copy_to_host(&self.logits, 0, forward.buffers.places.logits, rows.len() * row_bytes)?;
            stream.record(ended.end)?;
            ended.patience.wait(ended.end)?;
            let logits = self.logits.read()?;
            for (row, bytes) in rows.iter().zip(logits.chunks_exact(row_bytes)) {
                while let Some(before) = waiting.next_if(|next| next.sequence < row.sequence) {
                    report(before, &drawn, &mut output);
                }
                let (values, _) = bytes.as_chunks::<LOGIT_BYTES>();
                self.row.clear();
                self.row.extend(values.iter().map(|value| f32::from_le_bytes(*value)));
                let mut sink = Draw {
                    step: ended.step,
                    sampler: &mut self.sampler,
                    scratch: &mut self.scratch,
                    output: &mut output,
                };
                sink.row(row.sequence, row.position, &mut self.row);
            }
        }
        for row in waiting {
            report(row, &drawn, &mut output);
        }
        Ok(output)
    }

    fn read_drawn(&self, draws: usize) -> Result<Vec<Drawn>, WorkError> {
        let bytes = self.drawn.read()?;
        let (records, _) = bytes.as_chunks::<DRAWN_BYTES>();
        let known = records.iter().take(draws).map(|record| Drawn::from_bytes(*record));
        known.collect::<Option<Vec<Drawn>>>().ok_or(WorkError::UnknownDraw)
    }
}

/// Tells the tokens of a row that the device has drawn.
fn report(row: &DrawnRow, drawn: &[Drawn], output: &mut StepOutput) {
    let drawn = drawn.get(row.draws.clone()).unwrap_or_default();
    output
        .sampled
        .extend((row.first_choice..).zip(drawn).map(|(choice, drawn)| SampledToken {
            row: u32::try_from(row.sequence).unwrap_or(u32::MAX),
            choice: ChoiceIndex(choice),
            token: match drawn {
                Drawn::Token(token) => Ok(*token),
                Drawn::NotFinite(_) => Err(SamplingFailed::NotFinite),
                Drawn::NothingLeft => Err(SamplingFailed::RuledOut),
            },
            logprobs: None,
        }));
}

#[cfg(test)]
mod tests {
    use serving_core::ids::TokenId;

    use super::*;

    #[test]
    fn each_choice_of_a_row_gets_its_own_draw() {
        let row = DrawnRow {
            sequence: 3,
            first_choice: 1,
            draws: 1..3,
        };
        let drawn = [
            Drawn::NothingLeft,
            Drawn::Token(TokenId(9)),
            Drawn::NotFinite(TokenId(2)),
        ];
        let mut output = StepOutput::default();
        report(&row, &drawn, &mut output);
        let told: Vec<_> = output
            .sampled
            .iter()
            .map(|one| (one.row, one.choice, one.token))
            .collect();
        let expected = [
            (3, ChoiceIndex(1), Ok(TokenId(9))),
            (3, ChoiceIndex(2), Err(SamplingFailed::NotFinite)),
        ];
        assert_eq!(told, expected);
    }
}
