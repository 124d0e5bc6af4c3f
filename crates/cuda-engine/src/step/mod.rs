//! What the device is told about a step: tables of numbers in pinned memory, which one copy brings to fixed addresses.
//!
//! `rows.rs` lists the rows and how attention takes them, `logits.rs` what is drawn where, `layout.rs` gives both their places.

mod layout;
mod logits;
mod rows;

pub(crate) use self::layout::{Layout, table_bytes_max};
pub(crate) use self::logits::{DrawnRow, LogitsPlan, Pass};
pub(crate) use self::rows::{GraphKey, RowRules, RowTables, StepShape};
