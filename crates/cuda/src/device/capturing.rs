//! Whether a thread captures a graph, and what that graph needs as long as it lives.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;

/// The code of a kernel. This file does not know its type.
pub(super) type Kept = Arc<dyn Any + Send + Sync>;

thread_local! {
    /// While this thread captures: what the graph needs.
    static CAPTURED: RefCell<Option<Vec<Kept>>> = const { RefCell::new(None) };
}

/// Whether this thread captures. It is also asked in drops at the end of a thread, when the variable may be gone.
pub(super) fn is_capturing() -> bool {
    let asked = CAPTURED.try_with(|captured| captured.try_borrow().is_ok_and(|captured| captured.is_some()));
    asked.unwrap_or(false)
}

/// Keeps something for the graph that is being captured, if one is.
pub(super) fn keep(needed: Kept) {
    let _ = CAPTURED.try_with(|captured| {
        if let Ok(mut captured) = captured.try_borrow_mut()
            && let Some(kept) = captured.as_mut()
            && !kept.iter().any(|one| Arc::ptr_eq(one, &needed))
        {
            kept.push(needed);
        }
    });
}

pub(super) fn set(kept: Option<Vec<Kept>>) -> Vec<Kept> {
    let before = CAPTURED.try_with(|captured| {
        captured
            .try_borrow_mut()
            .ok()
            .and_then(|mut c| std::mem::replace(&mut *c, kept))
    });
    before.ok().flatten().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_captures_only_between_begin_and_end() {
        assert!(!is_capturing());
        set(Some(Vec::new()));
        assert!(is_capturing());
        assert!(!std::thread::spawn(is_capturing).join().expect("it ends"));
        assert!(set(None).is_empty());
        assert!(!is_capturing());
    }
}
