//! Decode steps as CUDA graphs: one launch instead of some hundred. A graph has the shape of its step and fixed addresses; what
//! changes from step to step is in the tables, which are copied before the launch.
//!
//! The first step of a shape runs without a graph, so that code and plans that it needs are loaded. The second captures.

use std::collections::BTreeMap;

use cuda::{Cause, CudaError, Graph, Stream};

use crate::error::WorkError;
use crate::step::GraphKey;

/// Shapes that have a graph: seven sizes of a batch, thirteen lengths up to a context of 2^20. Steps of further shapes run
/// without one.
const GRAPHS_MAX: usize = 96;

#[derive(Debug)]
enum Kept {
    /// It has run once.
    Seen,
    Captured(Graph),
    /// It could not be captured.
    NotCapturable,
}

/// The graphs of one stream's steps.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    kept: BTreeMap<GraphKey, Kept>,
}

impl Graphs {
    /// Gives a step to the stream, as a graph if there is one or if it is time to make it. `enqueue` gives the step's work to a
    /// stream; it must give the same work for the same key.
    pub(crate) fn run(
        &mut self,
        key: GraphKey,
        stream: &Stream,
        enqueue: impl Fn(&Stream) -> Result<(), WorkError>,
    ) -> Result<(), WorkError> {
        if let Some(Kept::Captured(graph)) = self.kept.get(&key) {
            return Ok(stream.launch_graph(graph)?);
        }
        let next = match self.kept.get(&key) {
            Some(Kept::Seen) => match capture(stream, &enqueue) {
                Ok(graph) => {
                    stream.launch_graph(&graph)?;
                    self.kept.insert(key, Kept::Captured(graph));
                    return Ok(());
                }
                Err(error) if error.is_sticky() => return Err(error),
                Err(error) => {
                    tracing::warn!(%error, ?key, "a decode step cannot be captured as a graph; it runs without one");
                    Some(Kept::NotCapturable)
                }
            },
            Some(Kept::Captured(_) | Kept::NotCapturable) => None,
            None => (self.kept.len() < GRAPHS_MAX).then_some(Kept::Seen),
        };
        if let Some(next) = next {
            self.kept.insert(key, next);
        }
        enqueue(stream)
    }

    /// How many shapes have a graph.
    pub(crate) fn captured(&self) -> usize {
        self.kept
            .values()
            .filter(|kept| matches!(kept, Kept::Captured(_)))
            .count()
    }
}

/// Captures the work. The error of the work says more than that of the capture.
fn capture(stream: &Stream, enqueue: &impl Fn(&Stream) -> Result<(), WorkError>) -> Result<Graph, WorkError> {
    let mut failed = None;
    let captured = stream.capture(|stream| {
        enqueue(stream).map_err(|error| {
            failed = Some(error);
            CudaError {
                call: "cuStreamEndCapture",
                cause: Cause::Misuse("the work of the graph failed"),
                context: String::new(),
            }
        })
    });
    match (captured, failed) {
        (_, Some(error)) => Err(error),
        (captured, None) => Ok(captured?),
    }
}
