//! The contract of engines on a CUDA device. `submit` gives a step to the device's stream and returns; `complete` waits for the
//! step's event, with a limit. The step's KV blocks are claimed until then, and for ever if the device hangs.

use std::fmt;
use std::sync::Arc;

use cuda::{Device, Event, EventUse, PinnedMemory, Stream};
use engine::for_devices::{BatchBounds, StepClaim};
use engine::{
    CompletedStep, DeviceMemoryUse, Engine, EngineError, EngineLimits, KvAccessError, KvMemory, ModelFacts, Step,
    StepOutput,
};

use crate::error::{CudaEngineError, WorkError};
use crate::finish::{Ended, HostSide};
use crate::forward::{Forward, Tables};
use crate::gate::GateVerdict;
use crate::graphs::Graphs;
use crate::kernels::FEW_ROWS;
use crate::kv::KvPool;
use crate::options::Mode;
use crate::step::{Layout, LogitsPlan, RowRules, RowTables, table_bytes_max};
use crate::times::{StepClock, StepTimes};
use crate::wait::Patience;

/// What an engine is made of.
pub(crate) struct Parts {
    pub facts: ModelFacts,
    pub limits: EngineLimits,
    pub mode: Mode,
    pub gate: GateVerdict,
    pub device: Device,
    pub stream: Stream,
    pub patience: Patience,
    pub forward: Forward,
    pub pool: KvPool,
    pub kv: Arc<KvMemory>,
}

/// A model on a CUDA device.
pub struct CudaEngine {
    parts: Parts,
    graphs: Graphs,
    tables: HostTables,
    host: HostSide,
    clock: StepClock,
    claim: StepClaim,
    state: State,
    /// An event that nobody has, for the next step.
    spare: Option<Event>,
    times: Option<StepTimes>,
}

/// What a step tells the device.
struct HostTables {
    rows: RowTables,
    logits: LogitsPlan,
    /// It is filled when the step before has completed, so no copy of it is under way.
    pinned: PinnedMemory,
}

enum State {
    Idle,
    /// Nothing was started; the engine goes on.
    Refused(Box<CompletedStep>),
    Launched(Box<Launched>),
    /// The device failed while the step was started.
    Failed(Box<CompletedStep>),
    /// The device has failed: no step runs any more.
    Ended,
}

struct Launched {
    step: Step,
    layout: Layout,
    end: Event,
}

enum NotStarted {
    Refused(EngineError),
    Failed(WorkError),
}

impl From<EngineError> for NotStarted {
    fn from(error: EngineError) -> Self {
        Self::Refused(error)
    }
}

impl From<KvAccessError> for NotStarted {
    fn from(error: KvAccessError) -> Self {
        Self::Refused(error.into())
    }
}

impl From<WorkError> for NotStarted {
    fn from(error: WorkError) -> Self {
        Self::Failed(error)
    }
}

impl fmt::Debug for CudaEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEngine")
            .field("facts", &self.parts.facts)
            .field("device", self.parts.device.facts())
            .field("mode", &self.parts.mode)
            .finish_non_exhaustive()
    }
}

impl CudaEngine {
    pub(crate) fn new(parts: Parts) -> Result<Self, CudaEngineError> {
        let device = &parts.device;
        let pinned = device.allocate_pinned(table_bytes_max(&parts.forward.capacity))?;
        Ok(Self {
            graphs: Graphs::default(),
            tables: HostTables {
                rows: RowTables::default(),
                logits: LogitsPlan::default(),
                pinned,
            },
            host: HostSide::new(device, parts.forward.model.vocab)?,
            clock: StepClock::new(device)?,
            claim: StepClaim::new(parts.kv.clone()),
            state: State::Idle,
            spare: None,
            times: None,
            parts,
        })
    }

    /// Runs every kernel of a step once, with rows of nobody: one, and so many that products take the kernel for many rows. Code of
    /// kernels may be loaded at its first launch, and the driver then waits for the whole device.
    pub(crate) fn run_first(&mut self) -> Result<(), WorkError> {
        let rules = self.rules();
        for rows in [1, FEW_ROWS + 1] {
            self.tables.rows.fill_with_padding(rules, rows);
            self.tables.logits.fill_with_padding();
            let (_, end) = self.launch()?;
            self.parts.patience.wait(&end)?;
            self.spare = Some(end);
        }
        Ok(())
    }

    /// How the kernels were checked at the opening.
    pub fn gate(&self) -> GateVerdict {
        self.parts.gate
    }

    /// Times of the step that has completed last.
    pub fn times(&self) -> Option<StepTimes> {
        self.times
    }

    /// Shapes of products that cuBLASLt computes.
    pub fn library_shapes(&self) -> usize {
        self.parts.forward.products.library_shapes()
    }

    /// Shapes of decode steps that are launched as graphs.
    pub fn graphs(&self) -> usize {
        self.graphs.captured()
    }

    fn rules(&self) -> RowRules {
        RowRules {
            mode: self.parts.mode,
            block_tokens: self.parts.facts.kv.block_tokens,
        }
    }

    /// Claims the step's blocks and starts it. A step without rows starts nothing, and `None` says so.
    fn start(&mut self, step: &Step) -> Result<Option<(Layout, Event)>, NotStarted> {
        let batch: Vec<_> = step.rows().iter().map(|row| step.sequence(row)).collect();
        let facts = &self.parts.facts;
        let bounds = BatchBounds {
            limits: self.parts.limits,
            vocab_size: facts.vocab_size,
            context_length: facts.context_length,
            geometry: facts.kv,
        };
        bounds.check(&batch)?;
        if batch.is_empty() {
            return Ok(None);
        }
        self.claim.take(&batch)?;
        let rules = self.rules();
        self.tables.rows.fill(&batch, rules);
        self.tables.logits.fill(step, &self.tables.rows.first_rows);
        Ok(Some(self.launch()?))
    }

    /// Gives the filled tables and everything that they ask for to the stream.
    fn launch(&mut self) -> Result<(Layout, Event), WorkError> {
        let Parts {
            device,
            stream,
            forward,
            ..
        } = &self.parts;
        let HostTables { rows, logits, pinned } = &mut self.tables;
        let layout = Layout::new(forward.buffers.places.tables, &rows.shape, logits);
        let end = match self.spare.take() {
            Some(event) => event,
            None => device.event(EventUse::Order)?,
        };
        layout.write(rows, logits, pinned.bytes_mut()?);
        self.clock.begin(stream)?;
        stream.copy_to_device(layout.start(), pinned, 0..layout.bytes)?;
        let tables = Tables {
            shape: &rows.shape,
            layout: &layout,
        };
        match rows.graph {
            Some(key) => self.graphs.run(key, stream, |stream| forward.run(stream, tables))?,
            None => forward.run(stream, tables)?,
        }
        self.clock.end_forward(stream)?;
        for pass in logits.passes() {
            forward.draw(stream, &layout, &pass)?;
        }
        self.host
            .fetch_drawn(stream, forward.buffers.places.drawn, logits.draw_count())?;
        self.clock.end_draw(stream)?;
        stream.record(&end)?;
        Ok((layout, end))
    }

    /// Waits for a step. Its event is then where the handoff finds it.
    fn wait_for(&mut self, launched: &Launched) -> Result<StepOutput, WorkError> {
        self.parts.patience.wait(&launched.end)?;
        self.times = self.clock.times()?;
        self.host.output(Ended {
            step: &launched.step,
            plan: &self.tables.logits,
            layout: &launched.layout,
            forward: &self.parts.forward,
            stream: &self.parts.stream,
            end: &launched.end,
            patience: &self.parts.patience,
        })
    }

    fn end_step(&mut self, launched: Launched) -> CompletedStep {
        let result = self.wait_for(&launched);
        let Launched { step, end, .. } = launched;
        match &result {
            Ok(_) => {
                self.spare = self.parts.pool.set_completed(end);
                self.claim.release();
            }
            Err(error) => self.fail(error),
        }
        let result = result.map_err(|error| error.for_engine());
        CompletedStep { step, result }
    }

    /// After an error of the device nobody knows what was written, so the engine ends.
    fn fail(&mut self, error: &WorkError) {
        tracing::error!(%error, is_sticky = error.is_sticky(), "the device failed in a step; this engine ends");
        self.settle();
        self.state = State::Ended;
    }

    /// Gives the blocks of a step back when nothing can use them any more. If that does not come, they stay claimed and nothing
    /// is freed, until the process ends.
    fn settle(&mut self) {
        let rest = self.come_to_rest();
        // A device that is lost runs nothing.
        if rest.as_ref().err().is_none_or(WorkError::is_sticky) {
            self.claim.release();
            return;
        }
        self.parts.patience.give_up();
        let nothing = StepClaim::new(self.parts.kv.clone());
        std::mem::forget(std::mem::replace(&mut self.claim, nothing));
    }

    /// Waits until the stream has ended everything.
    fn come_to_rest(&self) -> Result<(), WorkError> {
        let Parts {
            device,
            stream,
            patience,
            ..
        } = &self.parts;
        let end = device.event(EventUse::Order)?;
        stream.record(&end)?;
        patience.wait(&end)
    }
}

impl Engine for CudaEngine {
    fn model(&self) -> &ModelFacts {
        &self.parts.facts
    }

    fn limits(&self) -> EngineLimits {
        self.parts.limits
    }

    fn kv(&self) -> &Arc<KvMemory> {
        &self.parts.kv
    }

    fn device_memory(&self) -> Option<DeviceMemoryUse> {
        let Parts {
            device, forward, pool, ..
        } = &self.parts;
        Some(DeviceMemoryUse {
            weights_bytes: forward.weights.bytes() as u64,
            buffers_bytes: forward.buffers.bytes() as u64,
            kv_bytes: pool.bytes() as u64,
            free_bytes: device.memory().ok()?.free_bytes,
        })
    }

    fn submit(&mut self, step: Step) {
        let refused = |step, error| {
            let result = Err(error);
            State::Refused(Box::new(CompletedStep { step, result }))
        };
        match self.state {
            State::Ended => return,
            State::Idle => {}
            // A bug of the caller. The step that runs is waited for, so that its blocks are not claimed for ever.
            State::Refused(_) | State::Failed(_) | State::Launched(_) => {
                let _lost = self.complete();
                if !matches!(self.state, State::Ended) {
                    self.state = refused(step, EngineError::StillRunning);
                }
                return;
            }
        }
        self.state = match self.start(&step) {
            Ok(Some((layout, end))) => State::Launched(Box::new(Launched { step, layout, end })),
            Ok(None) => State::Refused(Box::new(CompletedStep {
                step,
                result: Ok(StepOutput::default()),
            })),
            Err(NotStarted::Refused(error)) => refused(step, error),
            Err(NotStarted::Failed(error)) => {
                self.fail(&error);
                let result = Err(error.for_engine());
                State::Failed(Box::new(CompletedStep { step, result }))
            }
        };
    }

    /// After a step that failed on the device there are no further ones: `None`, and the node ends its engine.
    fn complete(&mut self) -> Option<CompletedStep> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Idle => None,
            State::Refused(completed) => Some(*completed),
            State::Launched(launched) => Some(self.end_step(*launched)),
            State::Failed(completed) => {
                self.state = State::Ended;
                Some(*completed)
            }
            State::Ended => {
                self.state = State::Ended;
                None
            }
        }
    }
}

/// Nothing that the stream still runs may use memory that is freed, or blocks that are given back.
impl Drop for CudaEngine {
    fn drop(&mut self) {
        self.settle();
    }
}
