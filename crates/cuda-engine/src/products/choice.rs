//! Which way computes which shape. Each kind of matrix is timed once for each bucket of rows, with its own weights, before
//! anything is served. That also loads the library's code, which may wait for the whole device.

use std::sync::Arc;
use std::time::{Duration, Instant};

use cuda::cublaslt::{CublasLt, GemmError, GemmPlan, Workspace};
use cuda::{Device, Event, EventUse, Stream};

use super::buckets::RowBuckets;
use super::library::{LibraryProducts, Surroundings, can_compute, run, shape_of};
use super::own::OwnProducts;
use super::{Job, Multiply};
use crate::buffers::Buffers;
use crate::error::WorkError;
use crate::kernels::Kernels;
use crate::options::ProductChoice;

/// Ways of the library that are timed for a shape. The first guesses are mostly the best.
const WAYS_TIMED: usize = 4;
/// Runs that one figure is the mean of, after one that is not counted.
const RUNS: u32 = 3;
/// Shapes that are left after it take the library's first guess.
const MEASURE_TIME_MAX: Duration = Duration::from_secs(10);

/// Every product of a step.
#[derive(Debug)]
pub(crate) struct Products {
    own: OwnProducts,
    library: Option<LibraryProducts>,
}

/// What a choice is made with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Trial<'a> {
    pub device: &'a Device,
    pub stream: &'a Stream,
    pub buffers: &'a Buffers,
    /// Rows that the buffers have room for.
    pub rows_max: u32,
}

impl Products {
    pub(crate) fn own(kernels: Arc<Kernels>) -> Self {
        Self {
            own: OwnProducts { kernels },
            library: None,
        }
    }

    /// Decides for every kind of product, of which `jobs` has one each with the most rows that it can have. Their buffers are
    /// written to.
    ///
    /// # Errors
    /// The device failed. What the library does not compute is computed by the own kernel.
    pub(crate) fn choose(
        kernels: Arc<Kernels>,
        library: &CublasLt,
        trial: Trial<'_>,
        (choice, jobs): (ProductChoice, &[Job]),
    ) -> Result<Self, WorkError> {
        let mut products = Self::own(kernels.clone());
        let surroundings = Surroundings {
            kernels,
            workspace: Workspace {
                at: trial.buffers.places.workspace,
                bytes: trial.buffers.workspace_bytes,
            },
            zeros: trial.buffers.places.zeros,
        };
        let mut chosen = LibraryProducts {
            surroundings,
            buckets: RowBuckets::up_to(trial.rows_max),
            plans: Default::default(),
        };
        let clock = StopWatch::new(trial.device)?;
        let begun = Instant::now();
        for job in jobs.iter().filter(|job| can_compute(job)) {
            for rows in chosen
                .buckets
                .iter()
                .take_while(|rows| *rows <= job.rows)
                .collect::<Vec<u32>>()
            {
                let job = Job { rows, ..*job };
                let shape = shape_of(&job, rows);
                if chosen.plans.contains_key(&shape) {
                    continue;
                }
                let Some(mut plan) = plan(library, &job, trial.buffers.workspace_bytes)? else {
                    continue;
                };
                // A plan that has never run may be refused at its launch. When the time is over, the own kernels do the rest.
                if choice == ProductChoice::Measured && begun.elapsed() >= MEASURE_TIME_MAX {
                    continue;
                }
                let is_timed = choice == ProductChoice::Measured;
                let contest = Contest {
                    clock: &clock,
                    stream: trial.stream,
                    job: &job,
                };
                if !is_timed || contest.is_won_by(&mut plan, &chosen.surroundings, &products.own)? {
                    chosen.plans.insert(shape, plan);
                }
            }
        }
        tracing::info!(plans = chosen.plans.len(), took = ?begun.elapsed(), "products by cuBLASLt are chosen");
        products.library = Some(chosen);
        Ok(products)
    }

    /// Gives a product to the stream. With cuBLASLt, rows of padding behind the job's rows are written, too.
    pub(crate) fn enqueue(&self, stream: &Stream, job: &Job) -> Result<(), WorkError> {
        match self
            .library
            .as_ref()
            .filter(|library| can_compute(job) && library.has(job))
        {
            Some(library) => library.enqueue(stream, job),
            None => self.own.enqueue(stream, job),
        }
    }

    /// Shapes that cuBLASLt computes.
    pub(crate) fn library_shapes(&self) -> usize {
        self.library.as_ref().map_or(0, |library| library.plans.len())
    }
}

/// `None`: the library does not compute the shape.
fn plan(library: &CublasLt, job: &Job, workspace_bytes: usize) -> Result<Option<GemmPlan>, WorkError> {
    match GemmPlan::new(library, shape_of(job, job.rows), workspace_bytes) {
        Ok(plan) => Ok(Some(plan)),
        Err(error @ GemmError::Cuda(_)) => Err(error.into()),
        Err(error) => {
            tracing::debug!(%error, "cuBLASLt leaves a shape to the own kernel");
            Ok(None)
        }
    }
}

/// The time of work on a stream.
struct StopWatch {
    begun: Event,
    ended: Event,
}

impl StopWatch {
    fn new(device: &Device) -> Result<Self, WorkError> {
        Ok(Self {
            begun: device.event(EventUse::Timing)?,
            ended: device.event(EventUse::Timing)?,
        })
    }

    /// Milliseconds of some runs, after one that loads what it needs.
    fn time(&self, stream: &Stream, work: &dyn Fn() -> Result<(), WorkError>) -> Result<f32, WorkError> {
        work()?;
        stream.record(&self.begun)?;
        for _ in 0..RUNS {
            work()?;
        }
        stream.record(&self.ended)?;
        self.ended.synchronize()?;
        Ok(self.ended.ms_since(&self.begun)?)
    }
}

/// One job, timed by both ways.
struct Contest<'a> {
    clock: &'a StopWatch,
    stream: &'a Stream,
    job: &'a Job,
}

impl Contest<'_> {
    /// Whether a way of the library is faster than the own kernel. The plan takes its fastest one.
    fn is_won_by(
        &self,
        plan: &mut GemmPlan,
        surroundings: &Surroundings,
        own: &OwnProducts,
    ) -> Result<bool, WorkError> {
        let own_ms = self.clock.time(self.stream, &|| own.enqueue(self.stream, self.job))?;
        let mut best: Option<(f32, usize)> = None;
        for way in 0..plan.choices().min(WAYS_TIMED) {
            plan.choose(way);
            let timed = self
                .clock
                .time(self.stream, &|| run(surroundings, plan, (self.stream, self.job)));
            let took_ms = match timed {
                Ok(took_ms) => took_ms,
                // The library may refuse at the launch what it has offered.
                Err(WorkError::Product(error)) if !matches!(error, GemmError::Cuda(_)) => continue,
                Err(error) => return Err(error),
            };
            if best.is_none_or(|(best_ms, _)| took_ms < best_ms) {
                best = Some((took_ms, way));
            }
        }
        let Some((library_ms, way)) = best else {
            return Ok(false);
        };
        plan.choose(way);
        Ok(library_ms < own_ms)
    }
}
