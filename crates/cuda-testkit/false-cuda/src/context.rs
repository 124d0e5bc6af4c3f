//! Owns the stack of current contexts of each host thread. A context is the primary context of a device, and its handle is made of
//! the device's number. It never says whether the context is retained.

use std::cell::RefCell;

/// Handles are no pointers here. This is far from zero and from every address.
const FIRST_HANDLE: u64 = 0x00c0_de00;
const STEP: u64 = 16;

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn handle_of(device: usize) -> u64 {
    FIRST_HANDLE + STEP * device as u64
}

/// `None`: no handle of a context.
pub(crate) fn device_of(handle: u64) -> Option<usize> {
    let distance = handle.checked_sub(FIRST_HANDLE)?;
    (distance.is_multiple_of(STEP) && distance < 256 * STEP).then_some((distance / STEP) as usize)
}

/// The device whose context is current for this thread.
pub(crate) fn current() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

/// Puts a context in the place of the current one. `None` takes the current one away.
pub(crate) fn set_current(device: Option<usize>) {
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        stack.extend(device);
    });
}

pub(crate) fn push(device: usize) {
    CURRENT.with_borrow_mut(|stack| stack.push(device));
}

pub(crate) fn pop() -> Option<usize> {
    CURRENT.with_borrow_mut(Vec::pop)
}
