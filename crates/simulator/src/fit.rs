//! Least squares for a few figures that cannot be negative: from measured steps to `StepCosts`.
//!
//! Errors count as shares of the measured time: a decode step must be as well described as a chunk that takes a hundred times as
//! long. With six figures every subset can be tried, so the best solution without a negative one is found exactly.

use thiserror::Error;
use workload::statistics::Samples;

use crate::costs::{BATCHES, CHUNKS, FitPoint, FitReport, StepCosts, StepShape};
use crate::step_costs::on_the_line;

const FIGURES: usize = 6;
type Row = [f64; FIGURES];
/// Figures, batches and chunks are fitted in turn. What they share settles within a few rounds; ten leave room.
const ROUNDS: usize = 10;
/// The least share of a measured time that is left for the figures.
const LEFT_MIN: f64 = 0.1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FitError {
    #[error("{points} measured steps are too few for {FIGURES} figures; measure at least {} kinds of steps", 2 * FIGURES)]
    TooFew { points: usize },
    #[error("a measured step took no time; measure on a machine whose clock is finer than its steps")]
    NoTime,
    #[error("the measured steps do not tell the figures apart; vary chunks, contexts and batches independently")]
    Degenerate,
}

/// The costs that describe these steps best, and how well they do.
///
/// # Errors
/// Too few points, or points that are too much alike.
pub fn fit(measured: &[(StepShape, f64)]) -> Result<(StepCosts, FitReport), FitError> {
    if measured.len() < 2 * FIGURES {
        return Err(FitError::TooFew { points: measured.len() });
    }
    if measured
        .iter()
        .any(|(_, seconds)| !seconds.is_finite() || *seconds <= 0.0)
    {
        return Err(FitError::NoTime);
    }
    let mut costs = StepCosts::default();
    for _ in 0..ROUNDS {
        costs = refit(&costs, measured)?;
    }
    let points: Vec<FitPoint> = measured
        .iter()
        .map(|(shape, seconds)| FitPoint {
            shape: *shape,
            measured_seconds: *seconds,
            fitted_seconds: costs.seconds(shape),
        })
        .collect();
    let error = |point: &FitPoint| (point.fitted_seconds / point.measured_seconds - 1.0).abs();
    let errors = Samples::new(points.iter().map(error));
    let report = FitReport {
        error_median: errors.percentile(50.0).unwrap_or(0.0),
        error_max: errors.percentile(100.0).unwrap_or(0.0),
        points,
    };
    Ok((costs, report))
}

/// The sum of figures for what batches and chunks leave of the measured times, and then batches and chunks for what that sum leaves.
fn refit(before: &StepCosts, measured: &[(StepShape, f64)]) -> Result<StepCosts, FitError> {
    let rows = measured.iter().map(|(shape, seconds)| {
        // Nearly all of a step's time may belong to its batch; then there is no share of it to fit.
        let left = (seconds - before.more_than_the_sum(shape)).max(seconds * LEFT_MIN);
        counts(shape).map(|count| count / left)
    });
    let figures = non_negative(&rows.collect::<Vec<Row>>()).ok_or(FitError::Degenerate)?;
    let sum = StepCosts {
        fixed_seconds: figures[0],
        draw_seconds: figures[1],
        prefill_token_seconds: figures[2],
        prefill_pair_seconds: figures[3],
        decode_row_seconds: figures[4],
        decode_context_token_seconds: figures[5],
        ..StepCosts::default()
    };
    let (batch_seconds, batch_context_token_seconds) = batch_lines(&sum, measured);
    Ok(StepCosts {
        batch_seconds,
        batch_context_token_seconds,
        chunk_seconds: chunk_seconds(&sum, measured),
        ..sum
    })
}

type OfBatches = [f64; BATCHES.len()];

/// What the steps of each batch take more than the sum: at no position, and for each. A number of sequences that was not measured is on
/// the line between its neighbours.
fn batch_lines(sum: &StepCosts, measured: &[(StepShape, f64)]) -> (OfBatches, OfBatches) {
    let of_batch = |batch| Some((batch, batch_line(sum, measured, batch)?));
    let (places, lines): (Vec<u64>, Vec<(f64, f64)>) = BATCHES.into_iter().filter_map(of_batch).unzip();
    let (seconds, slopes): (Vec<f64>, Vec<f64>) = lines.into_iter().unzip();
    let on = |values: &[f64]| BATCHES.map(|batch| on_the_line(&places, values, batch));
    (on(&seconds), on(&slopes))
}

/// What the steps of a batch take more than the sum, as a line over their positions: at none, and for each. It is the line of least
/// squares in seconds. Level where only one number of positions was measured. `None`: no such step was measured.
fn batch_line(sum: &StepCosts, measured: &[(StepShape, f64)], batch: u64) -> Option<(f64, f64)> {
    let of_batch = measured
        .iter()
        .filter(|(shape, _)| shape.prefill_tokens == 0 && shape.decode_rows == batch);
    let more = of_batch.map(|(shape, seconds)| (shape.decode_context as f64, seconds - sum.seconds(shape)));
    let points: Vec<(f64, f64)> = more.collect();
    if points.is_empty() {
        return None;
    }
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (position, seconds) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - position).powi(2)).sum();
    let together: f64 = points
        .iter()
        .map(|point| (point.0 - position) * (point.1 - seconds))
        .sum();
    // With more positions no step is faster, so that none takes less than no time.
    let slope = if spread > 0.0 { together / spread } else { 0.0 }.max(-sum.decode_context_token_seconds);
    Some((seconds - slope * position, slope))
}

/// The median of what the steps with a chunk of each size take more than the sum. A size that was not measured is on the line between its
/// neighbours.
fn chunk_seconds(sum: &StepCosts, measured: &[(StepShape, f64)]) -> [f64; CHUNKS.len()] {
    let of_chunk = |chunk| {
        let is_of_chunk = |shape: &StepShape| shape.prefill_tokens == chunk && shape.decode_rows == 0;
        Some((chunk, more_than(sum, measured, is_of_chunk)?))
    };
    let (places, more): (Vec<u64>, Vec<f64>) = CHUNKS.into_iter().filter_map(of_chunk).unzip();
    CHUNKS.map(|chunk| on_the_line(&places, &more, chunk))
}

/// The median of what these steps take more than the sum. `None`: no such step was measured.
fn more_than(sum: &StepCosts, measured: &[(StepShape, f64)], is_of_kind: impl Fn(&StepShape) -> bool) -> Option<f64> {
    let of_kind = measured.iter().filter(|(shape, _)| is_of_kind(shape));
    Samples::new(of_kind.map(|(shape, seconds)| seconds - sum.seconds(shape))).percentile(50.0)
}

/// In the order of the figures.
fn counts(shape: &StepShape) -> Row {
    [
        1.0,
        if shape.draws > 0 { 1.0 } else { 0.0 },
        shape.prefill_tokens as f64,
        shape.prefill_pairs as f64,
        shape.decode_rows as f64,
        shape.decode_context as f64,
    ]
}

/// Minimises the sum of (row . x - 1)^2 over x >= 0.
fn non_negative(rows: &[Row]) -> Option<Row> {
    // Columns of like size make the equations well conditioned.
    let scale: Row = std::array::from_fn(|i| rows.iter().map(|row| row[i] * row[i]).sum::<f64>().sqrt());
    let scaled = |row: &Row| -> Row { std::array::from_fn(|i| if scale[i] > 0.0 { row[i] / scale[i] } else { 0.0 }) };
    let rows: Vec<Row> = rows.iter().map(scaled).collect();
    let mut best: Option<(f64, Row)> = None;
    for subset in 1_u32..1 << FIGURES {
        let used: Vec<usize> = (0..FIGURES).filter(|i| subset >> i & 1 == 1).collect();
        let Some(solution) = solve(&rows, &used) else {
            continue;
        };
        if solution.iter().any(|figure| *figure < 0.0) {
            continue;
        }
        let residual = |row: &Row| row.iter().zip(&solution).map(|(a, x)| a * x).sum::<f64>() - 1.0;
        let error: f64 = rows.iter().map(|row| residual(row).powi(2)).sum();
        if best.as_ref().is_none_or(|(least, _)| error < *least) {
            best = Some((error, solution));
        }
    }
    let (_, solution) = best?;
    Some(std::array::from_fn(|i| {
        if scale[i] > 0.0 { solution[i] / scale[i] } else { 0.0 }
    }))
}

/// The normal equations of these columns, by elimination with pivots. `None`: the columns depend on each other.
fn solve(rows: &[Row], used: &[usize]) -> Option<Row> {
    let n = used.len();
    let product = |i: usize, j: usize| rows.iter().map(|row| row[used[i]] * row[used[j]]).sum::<f64>();
    let mut equations: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let right = rows.iter().map(|row| row[used[i]]).sum::<f64>();
            (0..n).map(|j| product(i, j)).chain([right]).collect()
        })
        .collect();
    for column in 0..n {
        let pivot = (column..n).max_by(|a, b| equations[*a][column].abs().total_cmp(&equations[*b][column].abs()))?;
        // Of columns with length 1.
        if equations[pivot][column].abs() < 1e-10 {
            return None;
        }
        equations.swap(column, pivot);
        let head = equations[column].clone();
        for (_, equation) in equations.iter_mut().enumerate().filter(|(row, _)| *row != column) {
            let share = equation[column] / head[column];
            for (value, of_head) in equation.iter_mut().zip(&head) {
                *value -= share * of_head;
            }
        }
    }
    let mut solution = [0.0; FIGURES];
    for (i, column) in used.iter().enumerate() {
        solution[*column] = equations[i][n] / equations[i][i];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arithmetic::{factor, keyed};
    use crate::costs::ColdCosts;

    const TRUTH: StepCosts = StepCosts {
        fixed_seconds: 0.008,
        prefill_token_seconds: 0.000_9,
        prefill_pair_seconds: 4e-8,
        decode_row_seconds: 0.001_2,
        decode_context_token_seconds: 6e-7,
        draw_seconds: 0.003,
        batch_seconds: [0.0; BATCHES.len()],
        batch_context_token_seconds: [0.0; BATCHES.len()],
        chunk_seconds: [0.0; CHUNKS.len()],
        variation: 0.0,
        prompt_variation: 0.0,
        cold: ColdCosts {
            seconds: 0.0,
            steps: 0.0,
        },
    };

    fn steps(variation: f64) -> Vec<(StepShape, f64)> {
        let mut measured = Vec::new();
        let mut add = |shape: StepShape| {
            let noise = factor(keyed(3, 4, measured.len() as u64), variation);
            measured.push((shape, TRUTH.seconds(&shape) * noise));
        };
        for context in [0, 256, 1_024] {
            for chunk in [16, 64, 256, 1_024] {
                for draws in [0, 1] {
                    let mut shape = StepShape::default();
                    shape.add(chunk, context, draws);
                    add(shape);
                }
            }
            for batch in [1, 4, 16] {
                let mut shape = StepShape::default();
                (0..batch).for_each(|_| shape.add(1, context, 1));
                add(shape);
            }
        }
        measured
    }

    #[test]
    fn exact_steps_give_the_exact_costs() {
        let (costs, report) = fit(&steps(0.0)).expect("a fit");
        assert!(
            (costs.fixed_seconds / TRUTH.fixed_seconds - 1.0).abs() < 1e-6,
            "{costs:?}"
        );
        assert!((costs.prefill_pair_seconds / TRUTH.prefill_pair_seconds - 1.0).abs() < 1e-6);
        assert!((costs.decode_context_token_seconds / TRUTH.decode_context_token_seconds - 1.0).abs() < 1e-6);
        assert!(report.error_max < 1e-9, "{}", report.error_max);
    }

    #[test]
    fn noise_moves_the_costs_little_and_shows_in_the_report() {
        let (costs, report) = fit(&steps(0.05)).expect("a fit");
        assert!((costs.prefill_token_seconds / TRUTH.prefill_token_seconds - 1.0).abs() < 0.1);
        assert!((0.005..0.1).contains(&report.error_median), "{}", report.error_median);
    }

    /// The fit to steps of which some take more than the sum.
    fn fit_with(more: impl Fn(&StepShape) -> f64) -> (StepCosts, FitReport) {
        let uneven = steps(0.0)
            .into_iter()
            .map(|(shape, seconds)| (shape, seconds + more(&shape)));
        fit(&uneven.collect::<Vec<_>>()).expect("a fit")
    }

    #[test]
    fn batches_that_fill_a_kernel_are_described() {
        // Up to four sequences take as long as four.
        let (costs, report) = fit_with(|shape| match (shape.prefill_tokens, shape.decode_rows) {
            (0, 1) => 3.0 * TRUTH.decode_row_seconds,
            _ => 0.0,
        });
        assert!(report.error_max < 0.03, "{}", report.error_max);
        let seconds = |rows: u64| {
            let shape = StepShape {
                decode_rows: rows,
                draws: rows,
                ..StepShape::default()
            };
            costs.seconds(&shape)
        };
        assert!(
            (seconds(1) / seconds(4) - 1.0).abs() < 0.03,
            "{} and {}",
            seconds(1),
            seconds(4)
        );
        assert!(seconds(16) > seconds(4));
    }

    #[test]
    fn a_batch_between_two_that_were_measured_is_on_the_line_between_them() {
        let (costs, _) = fit_with(|shape| match (shape.prefill_tokens, shape.decode_rows) {
            (0, 4) => 0.004,
            (0, 16) => 0.001,
            _ => 0.0,
        });
        let [one, two, three, four, six, eight, sixteen] = costs.batch_seconds;
        let between = |(low, high): (f64, f64), share: f64| low + (high - low) * share;
        let expected = [
            (two, between((one, four), 1.0 / 3.0)),
            (three, between((one, four), 2.0 / 3.0)),
            (six, between((four, sixteen), 1.0 / 6.0)),
            (eight, between((four, sixteen), 1.0 / 3.0)),
        ];
        for (found, on_the_line) in expected {
            assert!((found - on_the_line).abs() < 1e-9, "{:?}", costs.batch_seconds);
        }
    }

    #[test]
    fn a_sequence_alone_that_waits_for_its_kv_is_described() {
        let waits = 2.0 * TRUTH.decode_context_token_seconds;
        let (costs, report) = fit_with(|shape| match shape.decode_rows {
            1 => waits * shape.decode_context as f64,
            _ => 0.0,
        });
        assert!(report.error_max < 0.01, "{}", report.error_max);
        let of_position = |rows: u64| {
            let seconds = |decode_context| {
                costs.seconds(&StepShape {
                    decode_rows: rows,
                    decode_context,
                    draws: rows,
                    ..StepShape::default()
                })
            };
            (seconds(1_000) - seconds(0)) / 1_000.0
        };
        assert!((of_position(1) / of_position(16) - 3.0).abs() < 0.1);
    }

    #[test]
    fn a_chunk_that_no_longer_fits_the_caches_is_described() {
        let (costs, report) = fit_with(|shape| match shape.prefill_tokens {
            1_024 => 0.3 * TRUTH.prefill_token_seconds * 1_024.0,
            _ => 0.0,
        });
        assert!(report.error_max < 0.03, "{}", report.error_max);
        let seconds = |chunk: u32| {
            let shapes = (0..1_024 / chunk).map(|number| {
                let mut shape = StepShape::default();
                shape.add(chunk, number * chunk, 0);
                shape
            });
            shapes.map(|shape| costs.seconds(&shape)).sum::<f64>()
        };
        // By the sum alone, four steps would take longer than one. 512 was not measured, and is on the line.
        assert!(seconds(256) < seconds(512) && seconds(512) < seconds(1_024));
    }

    #[test]
    fn no_figure_is_negative_whatever_was_measured() {
        // Longer contexts that are faster cannot be described; the figure is 0 then.
        let odd = steps(0.0).into_iter().map(|(shape, seconds)| {
            let speed_up = 1.0 + shape.decode_context as f64 * 1e-4;
            (shape, seconds / speed_up)
        });
        let (costs, _) = fit(&odd.collect::<Vec<_>>()).expect("a fit");
        assert_eq!(costs.decode_context_token_seconds, 0.0);
        assert!(costs.fixed_seconds >= 0.0 && costs.decode_row_seconds >= 0.0);
    }

    #[test]
    fn what_cannot_be_fitted_is_said() {
        assert_eq!(fit(&[]), Err(FitError::TooFew { points: 0 }));
        let mut none = steps(0.0);
        none[3].1 = 0.0;
        assert_eq!(fit(&none), Err(FitError::NoTime));
    }
}
