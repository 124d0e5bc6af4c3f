//! The stand-in engine on a double of a device, as a device engine is built: the host cannot address the KV blocks, a step
//! completes after the call that submitted it, and tokens are drawn where the logits are. It gives the tokens of the stand-in.

mod device;

use std::sync::Arc;

use model_files::model::Model;
use serving_core::ids::BlockId;

use crate::kv_claims::StepClaim;
use crate::on_host::Draw;
use crate::stand_in::{BlockBytes, Cells, StandInConfig};
use crate::{
    CompletedStep, Engine, EngineError, EngineLimits, KvAccessError, KvGeometry, KvMemory, KvMemoryError, ModelFacts,
    OpenError, OpenOptions, Sampler, SequenceRows, Step, StepOutput,
};

use device::{Device, Pending};

pub(crate) fn open(file: Option<&Model>, options: OpenOptions<'_>) -> Result<Box<dyn Engine>, OpenError> {
    Ok(Box::new(DeviceStandIn::new(StandInConfig::of(file, &options)?)?))
}

#[derive(Debug)]
struct DeviceStandIn {
    config: StandInConfig,
    facts: ModelFacts,
    device: Device,
    kv: Arc<KvMemory>,
    claim: StepClaim,
    /// With the device while a step runs.
    drawing: Option<Box<Drawing>>,
    running: Option<Running>,
}

/// What the device draws with.
#[derive(Debug)]
struct Drawing {
    sampler: Sampler,
    scratch: Vec<f32>,
    logits: Vec<f32>,
}

#[derive(Debug)]
enum Running {
    /// Nothing was started.
    Refused(Box<CompletedStep>),
    Launched(Pending<Launched>),
}

type Launched = (Box<Drawing>, CompletedStep);

impl DeviceStandIn {
    fn new(config: StandInConfig) -> Result<Self, OpenError> {
        config.limits.check().map_err(OpenError::Engine)?;
        let mut device = None;
        let kv = KvMemory::on_device(config.geometry, config.block_count, |bytes| {
            let made = Device::new(bytes).map_err(KvMemoryError::Device)?;
            Ok(Box::new(device.insert(made).clone()))
        });
        let kv = Arc::new(kv.map_err(EngineError::from)?);
        let device = device.ok_or(KvMemoryError::NoBlocks).map_err(EngineError::from)?;
        let drawing = Drawing {
            sampler: Sampler::new(config.vocab_size)?,
            scratch: Vec::new(),
            logits: vec![0.0; config.vocab_size as usize],
        };
        Ok(Self {
            facts: config.facts(),
            config,
            device,
            claim: StepClaim::new(kv.clone()),
            kv,
            drawing: Some(Box::new(drawing)),
            running: None,
        })
    }

    fn start(&mut self, step: &Step) -> Result<Box<Drawing>, EngineError> {
        let batch = batch_of(step);
        self.config.bounds().check(&batch)?;
        self.claim.take(&batch)?;
        self.drawing.take().ok_or(EngineError::StillRunning)
    }
}

impl Engine for DeviceStandIn {
    fn model(&self) -> &ModelFacts {
        &self.facts
    }
    fn limits(&self) -> EngineLimits {
        self.config.limits
    }
    fn kv(&self) -> &Arc<KvMemory> {
        &self.kv
    }

    fn submit(&mut self, step: Step) {
        self.running = Some(match self.start(&step) {
            Err(error) => {
                let result = Err(error);
                Running::Refused(Box::new(CompletedStep { step, result }))
            }
            Ok(drawing) => {
                let cells = self.config.cells();
                let work = move |memory: &mut [u8]| compute(cells, memory, (drawing, step));
                Running::Launched(self.device.launch(work))
            }
        });
    }

    fn complete(&mut self) -> Option<CompletedStep> {
        let completed = match self.running.take()? {
            Running::Refused(completed) => *completed,
            Running::Launched(pending) => match pending.wait() {
                Ok((drawing, completed)) => {
                    self.drawing = Some(drawing);
                    completed
                }
                Err(lost) => CompletedStep {
                    step: Step::default(),
                    result: Err(EngineError::KvAccess(lost.into())),
                },
            },
        };
        self.claim.release();
        Some(completed)
    }
}

/// Runs on the device.
fn compute(cells: Cells, memory: &mut [u8], (mut drawing, step): (Box<Drawing>, Step)) -> Launched {
    let geometry = cells.geometry;
    let mut blocks = DeviceBlocks { memory, geometry };
    let mut output = StepOutput::default();
    let batch = batch_of(&step);
    let Drawing {
        sampler,
        scratch,
        logits,
    } = &mut *drawing;
    let mut sink = Draw {
        step: &step,
        sampler,
        scratch,
        output: &mut output,
    };
    let written = cells.write_rows(&mut blocks, &batch);
    let drawn = written.and_then(|_| cells.logits(&blocks, &batch, logits, &mut sink));
    drop(batch);
    let result = drawn.map(|()| output).map_err(EngineError::from);
    (drawing, CompletedStep { step, result })
}

fn batch_of(step: &Step) -> Vec<SequenceRows<'_>> {
    step.rows().iter().map(|row| step.sequence(row)).collect()
}

/// The device's own view of its memory.
struct DeviceBlocks<'a> {
    memory: &'a mut [u8],
    geometry: KvGeometry,
}

impl DeviceBlocks<'_> {
    fn range(&self, block: BlockId) -> std::ops::Range<usize> {
        let bytes = self.geometry.block_bytes();
        block.0 as usize * bytes..(block.0 as usize + 1) * bytes
    }
}

impl BlockBytes for DeviceBlocks<'_> {
    fn bytes(&self, block: BlockId) -> Result<&[u8], KvAccessError> {
        Ok(&self.memory[self.range(block)])
    }
    fn bytes_mut(&mut self, block: BlockId) -> Result<&mut [u8], KvAccessError> {
        let range = self.range(block);
        Ok(&mut self.memory[range])
    }
}

#[cfg(test)]
mod tests;
