//! Branches, ends and fences.

use super::require;
use crate::instruction::Op;
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    match text.opcode() {
        "bra" => {
            text.take("uni");
            text.finish(1)?;
            let label = text.text(0)?.to_owned();
            text.labels.push(label);
            Ok(Op::Branch { to: 0 })
        }
        "brx" => {
            require(text, "idx")?;
            text.take("uni");
            text.finish(2)?;
            let list = text.text(1)?;
            let labels = text
                .names()
                .label_lists
                .get(list)
                .ok_or_else(|| Refusal::Undeclared(list.to_owned()))?;
            text.labels.clone_from(labels);
            Ok(Op::BranchTable {
                index: text.source(0, Type::U32)?,
                to: Box::default(),
            })
        }
        "trap" => {
            text.finish(0)?;
            Ok(Op::Trap)
        }
        "membar" => {
            text.take_hints(&["cta", "gl", "sys"]);
            text.finish(0)?;
            Ok(Op::Nothing)
        }
        "fence" => {
            text.take_hints(&["sc", "acq_rel", "cta", "gpu", "sys", "cluster"]);
            text.finish(0)?;
            Ok(Op::Nothing)
        }
        _ => {
            text.take("uni");
            text.finish(0)?;
            Ok(Op::Exit)
        }
    }
}
