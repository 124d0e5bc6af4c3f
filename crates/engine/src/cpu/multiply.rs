//! The product of a step's rows with matrices.
//!
//! With few rows (decode) each thread prepares a matrix's inputs for itself, which costs less than one more phase. With more rows this is a phase of its
//! own. With many rows, and where the instruction set gains by it, pairs of panels share what is loaded of the rows (`kernels::pairs`).

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::buffers::{Inputs, PAIR_ROWS, ProductScratch, Shared};
use super::forward::{FEW_ROWS, MANY_ROWS, ROWS_PER_TILE, Step, tile_rows};
use super::kernels::lanes::QuantisedBlock;
use super::kernels::{BLOCK, Kernels, LANES, Lanes, MAX_ROWS};
use super::pool::Pool;
use super::weights::Matrix;

/// Shares of a product with few rows, in sixteenths: there is one of each for every thread. Large ones come first, so that a thread streams neighbouring weights:
/// 16 equal tiles took 1.08 times as long with one stream on two cores of an AMD EPYC (589e6ac8). The small ones at the end are for the thread that is ahead.
const SHARES: [usize; 3] = [12, 3, 1];

/// A product of input rows with one or more matrices of equal column count.
pub(super) struct Product<'a> {
    pub(super) rows: usize,
    pub(super) matrices: &'a [&'a Matrix],
    pub(super) input: Input<'a>,
    pub(super) write: Write<'a>,
}

/// What takes the outputs of the rows from [`Place::first_row`] on.
pub(super) enum Write<'a> {
    Panel(&'a (dyn Fn(Place, &mut [Lanes]) + Sync)),
    /// Those of two neighbouring panels. The number of panels is even.
    TwoPanels(&'a (dyn Fn(Place, [&mut [Lanes]; 2]) + Sync)),
    /// Those of two neighbouring panels and of the next two, with memory for a block of each row. Only where [`Step::takes_pairs`], for matrices without
    /// biases whose number of panels is a multiple of four.
    FourPanels(&'a TakeFourPanels<'a>),
}

type TakeFourPanels<'a> = dyn Fn(Place, [[&mut [Lanes]; 2]; 2], &mut [QuantisedBlock]) + Sync + 'a;

impl Write<'_> {
    fn panels(&self) -> usize {
        match self {
            Write::Panel(_) => 1,
            Write::TwoPanels(_) => 2,
            Write::FourPanels(_) => 4,
        }
    }
}

/// Where outputs belong.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) matrix: usize,
    /// The first column: 16 times the index of the panel or of the two panels. For four panels 32 times their index.
    pub(super) column: usize,
    pub(super) first_row: usize,
}

/// Where the inputs of a product come from.
pub(super) enum Input<'a> {
    /// This writes those of a row.
    Made(&'a (dyn Fn(usize, &mut [f32]) + Sync)),
    /// An earlier phase wrote them, `[row][column]`. `write` must not touch this buffer: with few rows it is read in the phase in which `write`
    /// runs.
    Stored(&'a Shared<f32>),
    /// An earlier phase put them here as the kernels read them. Only for many rows.
    Ready(&'a Inputs),
}

impl Input<'_> {
    /// # Safety
    /// Nobody else uses this row of `inputs` meanwhile, nor `buffer`, and nobody writes what the input reads.
    unsafe fn prepare(&self, inputs: &Inputs, (row, columns): (usize, usize), kernels: &Kernels, buffer: &Shared<f32>) {
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                Input::Made(fill) => {
                    inputs.fill((row, columns), kernels, buffer.write(0..columns), |out| fill(row, out));
                }
                Input::Stored(from) => inputs.take(row, from.read(row * columns..(row + 1) * columns), kernels),
                Input::Ready(_) => unreachable!("only for many rows"),
            }
        }
    }
}

/// Up to four panels of a matrix.
struct Unit<'a> {
    matrix: &'a Matrix,
    /// The matrix's index.
    index: usize,
    panels: Range<usize>,
}

impl Step<'_> {
    pub(super) fn multiply(&self, pool: &mut Pool, product: &Product<'_>) {
        if product.rows > FEW_ROWS {
            self.multiply_many(pool, product);
        } else {
            self.multiply_few(pool, product);
        }
    }

    /// Whether pairs of panels are multiplied with so many rows.
    pub(super) fn takes_pairs(&self, rows: usize, matrix: &Matrix) -> bool {
        rows >= MANY_ROWS && matrix.pair_kernel(self.kernels).is_some()
    }

    fn multiply_few(&self, pool: &mut Pool, product: &Product<'_>) {
        let (rows, columns) = (product.rows, product.matrices[0].columns);
        let number = self.scratch.product.fetch_add(1, Ordering::Relaxed) + 1;
        let width = product.write.panels();
        let (units, threads) = (units(product, width), pool.active_threads());
        pool.parallel(SHARES.len() * threads, &|tile, thread| {
            let share = share_of(tile, threads, units);
            if share.is_empty() {
                return;
            }
            let own = &self.scratch.threads[thread];
            if own.prepared.swap(number, Ordering::Relaxed) != number {
                for row in 0..rows {
                    // SAFETY: these inputs belong to this thread alone, and a product writes another buffer than its input reads.
                    unsafe {
                        product
                            .input
                            .prepare(&own.inputs, (row, columns), self.kernels, &own.row)
                    };
                }
            }
            for unit in share {
                self.multiply_by_rows(
                    product,
                    (&own.inputs, 0..rows),
                    &unit_at(product, width, unit),
                    &own.products,
                );
            }
        });
    }

    fn multiply_many(&self, pool: &mut Pool, product: &Product<'_>) {
        let (rows, columns) = (product.rows, product.matrices[0].columns);
        let inputs = match product.input {
            Input::Ready(inputs) => inputs,
            _ => &self.scratch.inputs,
        };
        if !matches!(product.input, Input::Ready(_)) {
            pool.parallel(rows.div_ceil(ROWS_PER_TILE), &|tile, thread| {
                let buffer = &self.scratch.threads[thread].row;
                for row in tile_rows(tile, rows) {
                    // SAFETY: each row is prepared by one tile, the buffer is this thread's, and nothing is written in this phase but inputs.
                    unsafe { product.input.prepare(inputs, (row, columns), self.kernels, buffer) };
                }
            });
        }
        let many = product.matrices.iter().all(|matrix| self.takes_pairs(rows, matrix));
        let width = match many {
            true => product.write.panels().max(2),
            false => product.write.panels(),
        };
        let (units, parts, threads) = (units(product, width), rows.div_ceil(PAIR_ROWS), pool.active_threads());
        pool.parallel(units * parts, &|tile, thread| {
            let first_row = tile % parts * PAIR_ROWS;
            let rows = first_row..(first_row + PAIR_ROWS).min(rows);
            let number = tile / parts;
            let unit = unit_at(product, width, number);
            let scratch = &self.scratch.threads[thread].products;
            if !many {
                return self.multiply_by_rows(product, (inputs, rows), &unit, scratch);
            }
            // What this thread takes next, if all threads are equally fast.
            let next = (tile + threads) / parts;
            let next = (next != number && next < units).then(|| unit_at(product, width, next));
            self.multiply_pairs(product, (inputs, rows), (&unit, next.as_ref()), scratch);
        });
    }

    /// One pair of panels or two, and up to [`PAIR_ROWS`] rows.
    fn multiply_pairs(
        &self,
        product: &Product<'_>,
        (inputs, rows): (&Inputs, Range<usize>),
        (unit, next): (&Unit<'_>, Option<&Unit<'_>>),
        scratch: &ProductScratch,
    ) {
        let matrix = unit.matrix;
        let Some(kernel) = matrix.pair_kernel(self.kernels) else {
            unreachable!("every matrix of the product has one")
        };
        // SAFETY: the rows were prepared in an earlier phase.
        let input = unsafe { inputs.rows(rows.start, rows.len(), matrix.columns) };
        // SAFETY: this memory belongs to this thread alone.
        let (blocks, mut sums, quantised) = unsafe {
            (
                scratch.blocks.write(0..scratch.blocks.len()),
                scratch.sums.each_ref().map(|sums| sums.write(0..rows.len())),
                scratch.quantised.write(0..rows.len()),
            )
        };
        for (pair, sums) in sums.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let Some(panels) = self.pair_of(unit, pair) else { break };
            let ahead = next.and_then(|next| self.pair_of(next, pair)).unwrap_or_default();
            kernel.dot((panels, ahead), &input, blocks, sums.each_mut().map(|sums| &mut **sums));
        }
        let [first, second, third, fourth] = sums;
        match product.write {
            Write::FourPanels(write) => {
                assert!(unit.panels.len() == 4 && matrix.bias(unit.panels.start).is_none());
                let place = Place {
                    matrix: unit.index,
                    column: unit.panels.start / 4 * BLOCK,
                    first_row: rows.start,
                };
                write(place, [[first, second], [third, fourth]], quantised);
            }
            _ => self.take(product, (unit, rows.start), [first, second]),
        }
    }

    /// The panels of a unit's pair. The last panel of an odd number is its own neighbour, whose sums nobody takes.
    fn pair_of(&self, unit: &Unit<'_>, pair: usize) -> Option<[&[u8]; 2]> {
        let first = unit.panels.start + 2 * pair;
        let last = unit.panels.end.checked_sub(1)?;
        (first <= last).then(|| [first, (first + 1).min(last)].map(|panel| self.weights.panel(unit.matrix, panel)))
    }

    /// One or two panels, with a call of a kernel for each panel and up to 8 rows.
    fn multiply_by_rows(
        &self,
        product: &Product<'_>,
        (inputs, rows): (&Inputs, Range<usize>),
        unit: &Unit<'_>,
        scratch: &ProductScratch,
    ) {
        let matrix = unit.matrix;
        let kernel = matrix.kernel(self.kernels);
        // Not on the stack, which would be filled with zeros for all 8 rows first: most calls have one row.
        let [first, second, ..] = &scratch.sums;
        // SAFETY: this memory belongs to this thread alone.
        let mut outputs = unsafe { [first.write(0..MAX_ROWS), second.write(0..MAX_ROWS)] };
        for first_row in rows.clone().step_by(MAX_ROWS) {
            let count = (rows.end - first_row).min(MAX_ROWS);
            // SAFETY: the rows were prepared before this phase, or by this thread for itself.
            let input = unsafe { inputs.rows(first_row, count, matrix.columns) };
            for (panel, outputs) in unit.panels.clone().zip(&mut outputs) {
                let Some(outputs) = outputs.first_chunk_mut() else {
                    unreachable!("they have that many")
                };
                kernel(self.weights.panel(matrix, panel), &input, count, outputs);
            }
            let outputs = outputs.each_mut().map(|outputs| &mut outputs[..count]);
            self.take(product, (unit, first_row), outputs);
        }
    }

    /// Adds the biases, and gives the outputs away.
    fn take(&self, product: &Product<'_>, (unit, first_row): (&Unit<'_>, usize), mut outputs: [&mut [Lanes]; 2]) {
        for (panel, outputs) in unit.panels.clone().zip(&mut outputs) {
            if let Some(bias) = unit.matrix.bias(panel) {
                for (output, bias) in outputs.iter_mut().flat_map(|row| row.iter_mut().zip(bias)) {
                    *output += bias;
                }
            }
        }
        let place = |column| Place {
            matrix: unit.index,
            column,
            first_row,
        };
        match product.write {
            Write::FourPanels(_) => unreachable!("has a way of its own"),
            Write::TwoPanels(write) => write(place(unit.panels.start / 2 * LANES), outputs),
            Write::Panel(write) => {
                for (panel, outputs) in unit.panels.clone().zip(outputs) {
                    write(place(panel * LANES), outputs);
                }
            }
        }
    }
}

/// The units of a tile of [`SHARES`].
fn share_of(tile: usize, threads: usize, units: usize) -> Range<usize> {
    let total = SHARES.iter().sum::<usize>() * threads;
    let before = |tile: usize| {
        let (share, within) = (tile / threads, tile % threads);
        let own = SHARES.get(share).map_or(0, |share| share * within);
        (SHARES[..share].iter().sum::<usize>() * threads + own) * units / total
    };
    before(tile)..before(tile + 1)
}

/// How many units of `width` panels the matrices have.
fn units(product: &Product<'_>, width: usize) -> usize {
    product
        .matrices
        .iter()
        .map(|matrix| matrix.panels().div_ceil(width))
        .sum()
}

/// The unit of this number, counted over all matrices.
fn unit_at<'a>(product: &Product<'a>, width: usize, mut number: usize) -> Unit<'a> {
    let mut index = 0;
    loop {
        let matrix = product.matrices[index];
        let units = matrix.panels().div_ceil(width);
        if number < units {
            return Unit {
                matrix,
                index,
                panels: number * width..((number + 1) * width).min(matrix.panels()),
            };
        }
        (number, index) = (number - units, index + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_unit_is_in_one_share_and_large_shares_come_first() {
        for threads in [1, 2, 3, 7, 64] {
            for units in [1, 2, 5, 36, 192, 3_072] {
                let shares: Vec<_> = (0..SHARES.len() * threads)
                    .map(|tile| share_of(tile, threads, units))
                    .collect();
                assert_eq!(
                    shares.iter().cloned().flatten().collect::<Vec<_>>(),
                    (0..units).collect::<Vec<_>>()
                );
                let rounded = |tile: usize| shares[tile].len() + 1;
                assert!((1..shares.len()).all(|tile| shares[tile].len() <= rounded(tile - 1)));
            }
        }
    }
}
