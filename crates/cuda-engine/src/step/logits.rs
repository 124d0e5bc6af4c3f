//! Which rows need logits, and who draws from them: the device, or the host where log-probabilities are asked for or only some
//! tokens are allowed.
//!
//! A row is drawn on the host, too, when its records do not fit the tables. Both draw the same tokens (`engine::sample`).

use std::ops::Range;

use engine::{LogitsWanted, Step, StepRow};
use serving_core::ids::ChoiceIndex;

use crate::buffers::{DRAWS_MAX, LOGITS_ROWS};
use crate::kernels::calls::{Adjustment, Draw, EDIT_BYTES, Edit};

/// Changed logits of a step that fit the tables: 4 MiB. Rows beyond it are drawn on the host. A repetition penalty changes one
/// logit for each different token of a prompt, so this is 64 rows of 4,096.
pub(super) const EDITS_MAX: usize = 1 << 18;

/// Rows whose logits are made together, and the draws from them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pass {
    /// In the plan.
    pub first_row: usize,
    pub rows: u32,
    pub draws: Range<usize>,
}

/// A row that the device draws from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DrawnRow {
    /// The row of the step.
    pub sequence: usize,
    pub first_choice: u32,
    /// One for each choice.
    pub draws: Range<usize>,
}

/// A row whose logits come to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostRow {
    pub sequence: usize,
    pub position: u32,
}

/// Filled anew for each step; the memory is used again.
#[derive(Debug, Default)]
pub(crate) struct LogitsPlan {
    /// Rows of the batch: those of `drawn`, then those of `host`.
    pub rows: Vec<u32>,
    /// Records for the device, as bytes.
    pub adjustments: Vec<u8>,
    pub edits: Vec<u8>,
    pub draws: Vec<u8>,
    pub drawn: Vec<DrawnRow>,
    pub host: Vec<HostRow>,
    /// Rows of `host`, until they are put behind the others.
    pub(super) host_rows: Vec<u32>,
    pub(super) draw_count: usize,
}

impl LogitsPlan {
    /// `first_rows` has the first row of each sequence.
    pub(crate) fn fill(&mut self, step: &Step, first_rows: &[u32]) {
        self.clear();
        for (sequence, (row, first_row)) in step.rows().iter().zip(first_rows).enumerate() {
            let count = row.token_count();
            let wanted = match (row.logits, &row.draws) {
                (LogitsWanted::All, _) => 0..count,
                // A row that nothing is drawn from needs no logits.
                (_, None) => count..count,
                (_, Some(_)) => count.saturating_sub(1)..count,
            };
            let is_drawn = row.logits != LogitsWanted::All
                && row.request.logprobs.is_none()
                && !(row.draws.is_some() && row.is_constrained())
                && self.add_draws(step, (sequence, row), first_row + wanted.start);
            if !is_drawn {
                self.host_rows.extend(wanted.clone().map(|index| first_row + index));
                self.host.extend(wanted.map(|index| HostRow {
                    sequence,
                    position: row.first_position + index,
                }));
            }
        }
        self.rows.append(&mut self.host_rows);
    }

    /// One row and one draw of nobody, for a first run of all kernels.
    pub(crate) fn fill_with_padding(&mut self) {
        self.clear();
        self.rows.push(0);
        self.adjustments.extend(adjustment(0, 0).to_bytes());
        let draw = Draw {
            seed: 0,
            choice: 0,
            output_index: 0,
            logits_row: 0,
            top_k: Some(1),
            temperature: 1.0,
            top_p: 0.5,
            min_p: 0.0,
        };
        self.draws.extend(draw.to_bytes());
        self.drawn.push(DrawnRow {
            sequence: 0,
            first_choice: 0,
            draws: 0..1,
        });
        self.draw_count = 1;
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.adjustments.clear();
        self.edits.clear();
        self.draws.clear();
        self.drawn.clear();
        self.host.clear();
        self.host_rows.clear();
        self.draw_count = 0;
    }

    /// Whether the row is drawn on the device. Rows without a draw are: there is nothing to do for them.
    fn add_draws(&mut self, step: &Step, (sequence, row): (usize, &StepRow), batch_row: u32) -> bool {
        let Some(draws) = &row.draws else { return true };
        let choices = draws.choices.clone();
        if choices.is_empty() {
            return true;
        }
        // All choices of a row have the same edits.
        let edits = Edit::list(&step.sample_input(row, draws, ChoiceIndex(choices.start)));
        let first_edit = self.edits.len() / EDIT_BYTES;
        let draw_count = self.draw_count + choices.len();
        if first_edit + edits.len() > EDITS_MAX || draw_count > DRAWS_MAX {
            return false;
        }
        let params = &row.request.sampling;
        let adjustment = Adjustment {
            repetition_penalty: params.repetition_penalty,
            frequency_penalty: params.frequency_penalty,
            presence_penalty: params.presence_penalty,
            ..adjustment(first_edit as u32, edits.len() as u32)
        };
        self.adjustments.extend(adjustment.to_bytes());
        self.edits.extend(edits.into_iter().flat_map(Edit::to_bytes));
        // The rows of a pass are counted from its first one.
        let logits_row = self.drawn.len() as u32 % LOGITS_ROWS;
        for choice in choices.clone() {
            let input = step.sample_input(row, draws, ChoiceIndex(choice));
            self.draws.extend(Draw::of(&input, logits_row).to_bytes());
        }
        self.rows.push(batch_row);
        self.drawn.push(DrawnRow {
            sequence,
            first_choice: choices.start,
            draws: self.draw_count..draw_count,
        });
        self.draw_count = draw_count;
        true
    }

    pub(crate) fn draw_count(&self) -> usize {
        self.draw_count
    }

    /// The drawn rows, as many at a time as there is room for their logits.
    pub(crate) fn passes(&self) -> impl Iterator<Item = Pass> + '_ {
        let at_once = LOGITS_ROWS as usize;
        self.drawn.chunks(at_once).enumerate().map(move |(index, rows)| {
            let draws = (rows.first(), rows.last());
            Pass {
                first_row: index * at_once,
                rows: rows.len() as u32,
                draws: match draws {
                    (Some(first), Some(last)) => first.draws.start..last.draws.end,
                    _ => 0..0,
                },
            }
        })
    }
}

fn adjustment(first_edit: u32, edits: u32) -> Adjustment {
    Adjustment {
        first_edit,
        edits,
        repetition_penalty: 1.0,
        frequency_penalty: 0.0,
        presence_penalty: 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_rows_come_in_passes_of_as_many_as_there_is_room_for() {
        let drawn = (0..70).map(|row| DrawnRow {
            sequence: row,
            first_choice: 0,
            draws: 2 * row..2 * row + 2,
        });
        let plan = LogitsPlan {
            drawn: drawn.collect(),
            ..LogitsPlan::default()
        };
        let passes: Vec<Pass> = plan.passes().collect();
        assert_eq!(passes.len(), 2);
        assert_eq!((passes[0].rows, passes[0].draws.clone()), (64, 0..128));
        assert_eq!(
            (passes[1].first_row, passes[1].rows, passes[1].draws.clone()),
            (64, 6, 128..140)
        );
        assert_eq!(LogitsPlan::default().passes().count(), 0);
    }

    #[test]
    fn a_step_without_rows_draws_nothing() {
        let mut plan = LogitsPlan::default();
        plan.fill_with_padding();
        assert_eq!((plan.draw_count(), plan.rows.len()), (1, 1));
        plan.fill(&Step::default(), &[]);
        assert_eq!((plan.draw_count(), plan.rows.len()), (0, 0));
    }
}
