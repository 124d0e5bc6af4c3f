//! What threads do together: barriers, exchanges between lanes, matrices.

use super::{by_integer, require};
use crate::instruction::{Compute, Multiply, Op, Shuffle, Source, Vote, WarpAction, WarpOp};
use crate::number::{bits, integer};
use crate::ptx::error::Refusal;
use crate::ptx::operands::Operands;
use crate::types::Type;

pub(super) fn decode(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    match text.opcode() {
        "shfl" => shuffle(text),
        "vote" => vote(text),
        "redux" => reduce(text),
        "ldmatrix" => load_matrices(text),
        "mma" => multiply(text),
        _ => barrier(text),
    }
}

fn lanes(mask: Source, action: WarpAction) -> Op {
    Op::Warp(Box::new(WarpOp {
        mask: Some(mask),
        action,
    }))
}

fn all_lanes(action: WarpAction) -> Op {
    Op::Warp(Box::new(WarpOp { mask: None, action }))
}

/// `bar.sync 0` for the whole block, `bar.warp.sync` for lanes of a warp.
fn barrier(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    let is_of_warp = text.take("warp");
    require(text, "sync")?;
    if is_of_warp {
        text.finish(1)?;
        return Ok(lanes(text.source(0, Type::B32)?, WarpAction::Sync));
    }
    text.take_hints(&["cta", "aligned"]);
    text.finish(1)?;
    // Other barriers and barriers of a part of the block are not built.
    if text.source(0, Type::U32)? != Source::Constant(0) {
        return Err(Refusal::Operand(text.text(0)?.to_owned()));
    }
    Ok(Op::Barrier)
}

fn shuffle(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    require(text, "sync")?;
    let modes = [
        ("up", Shuffle::Up),
        ("down", Shuffle::Down),
        ("bfly", Shuffle::Xor),
        ("idx", Shuffle::Index),
    ];
    let mode = text.take_one(&modes).ok_or(Refusal::Missing("its mode"))?;
    require(text, "b32")?;
    text.finish(5)?;
    let (to, in_range) = text.register_pair(0)?;
    let (value, lane) = (text.source(1, Type::B32)?, text.source(2, Type::U32)?);
    let (clamp, mask) = (text.source(3, Type::U32)?, text.source(4, Type::B32)?);
    Ok(lanes(
        mask,
        WarpAction::Shuffle {
            mode,
            to,
            in_range,
            value,
            lane,
            clamp,
        },
    ))
}

fn vote(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    require(text, "sync")?;
    let modes = [
        ("all", Vote::All),
        ("any", Vote::Any),
        ("uni", Vote::Uniform),
        ("ballot", Vote::Ballot),
    ];
    let mode = text.take_one(&modes).ok_or(Refusal::Missing("its mode"))?;
    require(text, if mode == Vote::Ballot { "b32" } else { "pred" })?;
    text.finish(3)?;
    let mask = text.source(2, Type::B32)?;
    Ok(lanes(
        mask,
        WarpAction::Vote {
            mode,
            to: text.register(0)?,
            predicate: text.predicate(1)?,
        },
    ))
}

fn reduce(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    require(text, "sync")?;
    let names = ["add", "min", "max", "and", "or", "xor"].map(|name| (name, name));
    let name = text.take_one(&names).ok_or(Refusal::Missing("its operation"))?;
    let ty = text.take_type()?;
    if !ty.is_integer() || ty.bytes() != 4 {
        return Err(Refusal::Type(ty));
    }
    let f: Compute = match name {
        "add" => by_integer!(ty, integer::add),
        "min" => by_integer!(ty, integer::min),
        "max" => by_integer!(ty, integer::max),
        "and" => bits::and,
        "or" => bits::or,
        _ => bits::xor,
    };
    text.finish(3)?;
    let mask = text.source(2, Type::B32)?;
    Ok(lanes(
        mask,
        WarpAction::Reduce {
            f,
            to: text.register(0)?,
            value: text.source(1, ty)?,
        },
    ))
}

fn load_matrices(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    for modifier in ["sync", "aligned", "m8n8"] {
        require(text, modifier)?;
    }
    let count = text
        .take_one(&[("x1", 1), ("x2", 2), ("x4", 4)])
        .ok_or(Refusal::Missing("x1, x2 or x4"))?;
    let is_transposed = text.take("trans");
    let is_shared = text.take("shared") || text.take("shared::cta");
    if !is_shared {
        return Err(Refusal::Missing("shared"));
    }
    require(text, "b16")?;
    text.finish(2)?;
    let to = text.register_list(0)?;
    if to.len() != count {
        return Err(Refusal::OperandCount {
            found: to.len(),
            expected: count,
        });
    }
    Ok(all_lanes(WarpAction::LoadMatrices {
        to,
        address: text.address(1)?,
        is_transposed,
    }))
}

fn multiply(text: &mut Operands<'_>) -> Result<Op, Refusal> {
    for modifier in ["sync", "aligned", "row", "col"] {
        require(text, modifier)?;
    }
    let depth = text
        .take_one(&[("m16n8k8", 1), ("m16n8k16", 2)])
        .ok_or(Refusal::Missing("m16n8k8 or m16n8k16"))?;
    let (to_type, ty, b_type, c_type) = (
        text.take_type()?,
        text.take_type()?,
        text.take_type()?,
        text.take_type()?,
    );
    if to_type != Type::F32 || c_type != Type::F32 {
        return Err(Refusal::Type(if to_type == Type::F32 { c_type } else { to_type }));
    }
    if !matches!(ty, Type::F16 | Type::Bf16) || b_type != ty {
        return Err(Refusal::Type(b_type));
    }
    text.finish(4)?;
    let count = |found: usize, expected: usize| Refusal::OperandCount { found, expected };
    let (to, c) = (text.register_list(0)?, text.source_list(3, Type::F32)?);
    let to = <[u32; 4]>::try_from(to).map_err(|to| count(to.len(), 4))?;
    let c = <[Source; 4]>::try_from(c).map_err(|c| count(c.len(), 4))?;
    let (a, b) = (text.source_list(1, Type::B32)?, text.source_list(2, Type::B32)?);
    if a.len() != 2 * depth || b.len() != depth {
        return Err(count(a.len() + b.len(), 3 * depth));
    }
    Ok(all_lanes(WarpAction::Multiply(Multiply { ty, to, a, b, c })))
}
