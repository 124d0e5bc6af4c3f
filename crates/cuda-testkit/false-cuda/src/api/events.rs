//! Owns the functions on events. Events that processes share have a page: how often they were recorded, and which record is done.

use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::api;
use super::out::Out;
use crate::codes::{Answer, Code};
use crate::driver::Driver;
use crate::objects::{DONE, Event, RECORDED, Recorded};
use crate::order::Mark;
use crate::queue::Progress;
use crate::shared_page::SharedPage;
use crate::state::State;
use crate::work::Work;

/// `CU_EVENT_BLOCKING_SYNC` changes nothing here.
const BLOCKING_SYNC: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
const RECORD_EXTERNAL: c_uint = 1;

/// What a wait for an event waits for, now.
pub(crate) enum Goal {
    Never,
    Here(Mark),
    /// Another process has recorded the event.
    Elsewhere {
        page: Arc<SharedPage>,
        ticket: u64,
    },
    Captured {
        capture: u64,
        tips: Vec<usize>,
    },
}

pub(crate) fn goal_of(state: &State, event: u64) -> Result<Goal, Code> {
    let event = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
    let recorded = event
        .page
        .as_ref()
        .map(|page| page.word(RECORDED).load(Ordering::SeqCst));
    Ok(match (&event.recorded, recorded, &event.page) {
        (Recorded::Captured { capture, tips }, ..) => Goal::Captured {
            capture: *capture,
            tips: tips.clone(),
        },
        (Recorded::At { mark, .. }, None, _) => Goal::Here(mark.clone()),
        (Recorded::At { mark, ticket }, Some(latest), _) if latest == *ticket => Goal::Here(mark.clone()),
        (_, Some(ticket), Some(page)) if ticket > 0 => Goal::Elsewhere {
            page: Arc::clone(page),
            ticket,
        },
        _ => Goal::Never,
    })
}

fn create(state: &mut State, handle: Out<'_, u64>, flags: c_uint) -> Answer {
    let is_shared = flags & INTERPROCESS != 0;
    let has_timing = flags & DISABLE_TIMING == 0;
    if flags & !(BLOCKING_SYNC | DISABLE_TIMING | INTERPROCESS) != 0 || (is_shared && has_timing) {
        return Err(Code::INVALID_VALUE);
    }
    let device = state.current_device()?;
    let page = if is_shared {
        Some(Arc::new(SharedPage::new().map_err(|_| Code::OUT_OF_MEMORY)?))
    } else {
        None
    };
    let new = state.new_handle();
    state.events.insert(
        new,
        Event {
            device,
            has_timing,
            recorded: Recorded::Never,
            finished: None,
            page,
        },
    );
    handle.set(new)
}

fn record(state: &mut State, event: u64, stream: u64) -> Answer {
    let stream = state.stream(stream)?;
    let found = state.events.get(&event).ok_or(Code::INVALID_HANDLE)?;
    if found.device != state.streams[stream].device {
        return Err(Code::INVALID_HANDLE);
    }
    let page = found.page.clone();
    let recorded = if let Some(capture) = state.streams[stream].capture {
        if page.is_some() {
            state.misuse("an event that processes share is recorded in a capture, which is not modelled");
            return state.refuse_captured(stream);
        }
        Recorded::Captured {
            capture,
            tips: state.captured_tips(capture, stream)?,
        }
    } else {
        let ticket = match &page {
            Some(page) => page.word(RECORDED).fetch_add(1, Ordering::SeqCst) + 1,
            None => state.new_handle(),
        };
        state.submit(stream, Work::Record { event, ticket, page })?;
        Recorded::At {
            mark: state.streams[stream].last.clone(),
            ticket,
        }
    };
    if let Some(event) = state.events.get_mut(&event) {
        event.recorded = recorded;
    }
    Ok(())
}

/// The goal of a wait or a query, which must not be in a capture.
fn goal_outside_captures(state: &mut State, event: u64) -> Result<Goal, Code> {
    let goal = goal_of(state, event)?;
    if let Goal::Captured { capture, .. } = goal {
        state.invalidate_capture(capture);
        return Err(Code::CAPTURED_EVENT);
    }
    state.refuse_in_capture()?;
    Ok(goal)
}

fn wait_for(driver: &mut Driver, goal: &Goal) -> Answer {
    match goal {
        Goal::Never | Goal::Captured { .. } => Ok(()),
        Goal::Here(mark) => {
            driver.wait(std::slice::from_ref(mark))?;
            let device = driver.streams[mark.point.stream].device;
            driver.device_answer(device)
        }
        Goal::Elsewhere { page, ticket } => {
            driver.wait_until(|state| {
                if page.word(DONE).load(Ordering::SeqCst) >= *ticket {
                    return Progress::Done;
                }
                state.run_some();
                Progress::Blocked
            })?;
            let told = driver.told_to_processes(|mark| driver.is_done(mark.point));
            driver.learn(&told);
            Ok(())
        }
    }
}

/// When the device came to the last record of an event. `None`: it has not.
fn finished(state: &State, event: u64) -> Result<Option<Instant>, Code> {
    let event = state
        .events
        .get(&event)
        .filter(|event| event.has_timing)
        .ok_or(Code::INVALID_HANDLE)?;
    let Recorded::At { ticket, .. } = &event.recorded else {
        return Err(Code::INVALID_HANDLE);
    };
    Ok(event.finished.filter(|(done, _)| done == ticket).map(|(_, at)| at))
}

/// The time that the double took, which says nothing of a device.
fn elapsed_ms(state: &State, start: u64, end: u64) -> Result<f32, Code> {
    let (Some(start), Some(end)) = (finished(state, start)?, finished(state, end)?) else {
        return Err(Code::NOT_READY);
    };
    let later = end.saturating_duration_since(start).as_secs_f32();
    let earlier = start.saturating_duration_since(end).as_secs_f32();
    Ok((later - earlier) * 1e3)
}

api! {
fn cuEventCreate(Context, driver, handle: Out<'_, u64>, flags: c_uint) {
    create(driver, handle, flags)
}

fn cuEventDestroy_v2(Context, driver, event: u64) {
    driver.events.remove(&event).map(|_| ()).ok_or(Code::INVALID_HANDLE)
}

fn cuEventRecord(Context, driver, event: u64, stream: u64) {
    record(driver, event, stream)
}

fn cuEventRecordWithFlags(Context, driver, event: u64, stream: u64, flags: c_uint) {
    match flags {
        0 => record(driver, event, stream),
        RECORD_EXTERNAL => Err(Code::NOT_SUPPORTED),
        _ => Err(Code::INVALID_VALUE),
    }
}

fn cuEventQuery(Context, driver, event: u64) {
    let goal = goal_outside_captures(driver, event)?;
    driver.run_some();
    let is_done = match &goal {
        Goal::Never | Goal::Captured { .. } => true,
        Goal::Here(mark) => {
            let device = driver.streams[mark.point.stream].device;
            driver.device_answer(device)?;
            driver.is_done(mark.point)
        }
        Goal::Elsewhere { page, ticket } => page.word(DONE).load(Ordering::SeqCst) >= *ticket,
    };
    if !is_done {
        return Err(Code::NOT_READY);
    }
    // Does not wait any more; tells this thread what is over.
    wait_for(driver, &goal)
}

fn cuEventSynchronize(Context, driver, event: u64) {
    let goal = goal_outside_captures(driver, event)?;
    wait_for(driver, &goal)
}

fn cuEventElapsedTime(Context, driver, ms: Out<'_, f32>, start: u64, end: u64) {
    ms.set(elapsed_ms(driver, start, end)?)
}

fn cuEventElapsedTime_v2(Context, driver, ms: Out<'_, f32>, start: u64, end: u64) {
    ms.set(elapsed_ms(driver, start, end)?)
}
}
