//! Waits for the nodes' reports that come after the end of an answer, so that the record has them and no client waits for
//! them.

use std::sync::Arc;

use tokio::runtime::Handle;

use super::record::RequestRecord;
use super::run::Run;

/// The answer is written. The run is held, with its legs, until the nodes' last reports are in the record; then the record
/// ends. When the process ends, or too many records wait, the record ends with what is known.
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
