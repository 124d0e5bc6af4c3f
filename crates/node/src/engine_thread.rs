//! The engine runs on a thread of its own. The loop submits a step and goes on, and the completed step comes back through the inbox.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

use engine::{DeviceMemoryUse, Engine, EngineError, KvMemory, Step};
use grammar::{Grammars, Places};
use service_runtime::clock::Clock;
use service_runtime::failpoints::{self, FaultPoint};

use crate::constraints::AllowedThread;
use crate::inbox::{Inbox, StepDone};

/// What the node does, for the faults that tests make on purpose.
#[derive(Clone, Copy, Debug)]
pub struct NodeWork {
    pub hands_over: bool,
    pub decodes: bool,
}

/// The loop's end of the thread. Dropping it waits for the step that runs and ends the thread.
#[derive(Debug)]
pub struct EngineThread {
    kv: Arc<KvMemory>,
    device_memory: Option<DeviceMemoryUse>,
    /// At most one step is under way, so there is always room.
    steps: Option<SyncSender<Step>>,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// # Errors
    /// The system starts no thread.
    pub fn start(
        engine: Box<dyn Engine>,
        inbox: Arc<Inbox>,
        work: NodeWork,
        grammars: Arc<Grammars>,
    ) -> io::Result<Self> {
        let kv = engine.kv().clone();
        let device_memory = engine.device_memory();
        let (steps, submitted) = sync_channel(1);
        // Each choice of a request is a sequence of its own.
        let sequences = engine.limits().max_sequences as usize;
        let places = Places::new(grammars, engine.model().vocab_size, sequences);
        let allowed = AllowedThread::start(places, device_memory.is_some())?;
        let thread = std::thread::Builder::new().name("engine".to_owned());
        let thread = thread.spawn(move || {
            let mut engine = engine;
            // Dropped before the engine, also after a panic: an engine that goes waits for its device and gives gigabytes back.
            let gone = Gone(inbox);
            run((&mut *engine, &allowed), &submitted, (&gone.0, work));
        })?;
        Ok(Self {
            kv,
            device_memory,
            steps: Some(steps),
            thread: Some(thread),
        })
    }

    pub fn kv(&self) -> &Arc<KvMemory> {
        &self.kv
    }

    /// The use of the device's memory when the engine had opened. An engine takes all its memory then. The driver is not asked again,
    /// because that would be between two steps.
    pub fn device_memory(&self) -> Option<DeviceMemoryUse> {
        self.device_memory
    }

    /// The step before must have come back. This never waits. If the engine is gone, the inbox tells the loop.
    pub fn submit(&self, step: Step) {
        let sent = self.steps.as_ref().map(|steps| steps.try_send(step));
        debug_assert!(!matches!(sent, Some(Err(std::sync::mpsc::TrySendError::Full(_)))));
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            // A panic has been reported by the thread itself.
            let _ = thread.join();
        }
    }
}

/// Tells the loop when the thread ends, also by a panic.
struct Gone(Arc<Inbox>);

impl Drop for Gone {
    fn drop(&mut self) {
        self.0.engine_gone();
    }
}

fn run(
    (engine, allowed): (&mut dyn Engine, &AllowedThread),
    submitted: &Receiver<Step>,
    (inbox, work): (&Inbox, NodeWork),
) {
    while let Ok(mut step) = submitted.recv() {
        if work.hands_over {
            failpoints::hit(FaultPoint::MidChunk);
        }
        let began = Clock::now();
        if allowed.restrict(&mut step).is_none() {
            // The same as after a panic of this thread: the node ends, and its requests are placed anew.
            tracing::error!("the thread that works out the allowed tokens has ended");
            return;
        }
        engine.submit(step);
        let Some(completed) = engine.complete() else {
            return;
        };
        if let Err(error @ EngineError::Device(_)) = &completed.result {
            // The loop ends when this thread does. The requests are placed anew, as those of a node that dies.
            tracing::error!(%error, "the device is lost");
            return;
        }
        if work.decodes {
            failpoints::hit(FaultPoint::MidDecode);
        }
        // A process that stood still just now took longer for this step.
        let ended = Clock::now();
        inbox.step_done(StepDone {
            ended,
            took: ended.since(began),
            completed,
        });
    }
}
