//! What the nodes report after an answer's end: waited for beside it, so that the record has it and no client waits.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::record::RequestRecord;
use super::run::Run;

/// The answer is written. What is left of its run is waited for until the nodes' last reports are in the record, which
/// ends then; the legs are held meanwhile. When the process ends, or too many wait, the record ends with what is known.
pub fn answered(record: &Arc<RequestRecord>, run: &mut Run) {
    record.answered();
    let Some(mut unreported) = run.take_unreported() else {
        return;
    };
    let (Ok(runtime), true) = (Handle::try_current(), record.close_later()) else {
        return;
    };
    let record = record.clone();
    runtime.spawn(async move {
        unreported.reports().await;
        record.update(|generation| unreported.note(generation));
    });
}
