"""Omni-dimensional dynamic convolution (Li et al. 2022, arXiv:2209.07947), in the style of its published code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, in_planes, out_planes, kernel_size, groups=1, reduction=0.0625, kernel_num=4, min_channel=16):
        super().__init__()
        attention_channel = max(int(in_planes * reduction), min_channel)
        self.kernel_size = kernel_size
        self.temperature = 1.0
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Conv2d(in_planes, attention_channel, 1, bias=False)
        self.bn = nn.BatchNorm2d(attention_channel)
        self.relu = nn.ReLU(inplace=True)
        self.channel_fc = nn.Conv2d(attention_channel, in_planes, 1)
        self.func_channel = self.get_channel_attention
        if in_planes == groups and in_planes == out_planes:  # depthwise
            self.func_filter = self.skip
        else:
            self.filter_fc = nn.Conv2d(attention_channel, out_planes, 1)
            self.func_filter = self.get_filter_attention
        if kernel_size == 1:
            self.func_spatial = self.skip
        else:
            self.spatial_fc = nn.Conv2d(attention_channel, kernel_size * kernel_size, 1)
            self.func_spatial = self.get_spatial_attention
        if kernel_num == 1:
            self.func_kernel = self.skip
        else:
            self.kernel_fc = nn.Conv2d(attention_channel, kernel_num, 1)
            self.func_kernel = self.get_kernel_attention

    @staticmethod
    def skip(_):
        return 1.0

    def get_channel_attention(self, x):
        return torch.sigmoid(self.channel_fc(x).view(x.size(0), -1, 1, 1) / self.temperature)

    def get_filter_attention(self, x):
        return torch.sigmoid(self.filter_fc(x).view(x.size(0), -1, 1, 1) / self.temperature)

    def get_spatial_attention(self, x):
        spatial = self.spatial_fc(x).view(x.size(0), 1, 1, 1, self.kernel_size, self.kernel_size)
        return torch.sigmoid(spatial / self.temperature)

    def get_kernel_attention(self, x):
        kernel = self.kernel_fc(x).view(x.size(0), -1, 1, 1, 1, 1)
        return F.softmax(kernel / self.temperature, dim=1)

    def forward(self, x):
        x = self.relu(self.bn(self.fc(self.avgpool(x))))
        return self.func_channel(x), self.func_filter(x), self.func_spatial(x), self.func_kernel(x)


class ODConv2d(nn.Module):
    def __init__(self, in_planes, out_planes, kernel_size, stride=1, padding=0, groups=1, kernel_num=4):
        super().__init__()
        self.in_planes, self.out_planes, self.kernel_size = in_planes, out_planes, kernel_size
        self.stride, self.padding, self.groups, self.kernel_num = stride, padding, groups, kernel_num
        self.attention = Attention(in_planes, out_planes, kernel_size, groups, kernel_num=kernel_num)
        self.weight = nn.Parameter(torch.randn(kernel_num, out_planes, in_planes // groups, kernel_size, kernel_size))
        for i in range(kernel_num):
            nn.init.kaiming_normal_(self.weight[i], mode="fan_out", nonlinearity="relu")
        pointwise = kernel_size == 1 and kernel_num == 1
        self._forward_impl = self._forward_impl_pw1x if pointwise else self._forward_impl_common

    def _forward_impl_common(self, x):
        channel_attention, filter_attention, spatial_attention, kernel_attention = self.attention(x)
        batch_size, _, height, width = x.size()
        x = x * channel_attention
        x = x.reshape(1, -1, height, width)
        aggregate_weight = spatial_attention * kernel_attention * self.weight.unsqueeze(dim=0)
        aggregate_weight = torch.sum(aggregate_weight, dim=1).view(
            [-1, self.in_planes // self.groups, self.kernel_size, self.kernel_size]
        )
        output = F.conv2d(
            x, aggregate_weight, None, self.stride, self.padding, groups=self.groups * batch_size
        )  # fmt: skip
        output = output.view(batch_size, self.out_planes, output.size(-2), output.size(-1))
        return output * filter_attention

    def _forward_impl_pw1x(self, x):
        channel_attention, filter_attention, _, _ = self.attention(x)
        x = x * channel_attention
        output = F.conv2d(x, self.weight.squeeze(dim=0), None, self.stride, self.padding, groups=self.groups)
        return output * filter_attention

    def forward(self, x):
        return self._forward_impl(x)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inplanes, planes, stride, kernel_num):
        super().__init__()
        self.conv1 = ODConv2d(inplanes, planes, 3, stride, 1, kernel_num=kernel_num)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = ODConv2d(planes, planes, 3, 1, 1, kernel_num=kernel_num)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = _downsample(inplanes, planes * self.expansion, stride)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes, planes, stride, kernel_num):
        super().__init__()
        self.conv1 = ODConv2d(inplanes, planes, 1, kernel_num=kernel_num)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = ODConv2d(planes, planes, 3, stride, 1, kernel_num=kernel_num)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3 = ODConv2d(planes, planes * self.expansion, 1, kernel_num=kernel_num)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _downsample(inplanes, planes * self.expansion, stride)

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


def _downsample(inplanes, outplanes, stride):
    if stride == 1 and inplanes == outplanes:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inplanes, outplanes, 1, stride, bias=False), nn.BatchNorm2d(outplanes))


class ODResNet(nn.Module):
    def __init__(self, block, layers, kernel_num=4, width=16, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        blocks, inplanes = [], width
        for i, count in enumerate(layers):
            planes = width * 2**i
            for j in range(count):
                blocks.append(block(inplanes, planes, 2 if i and not j else 1, kernel_num))
                inplanes = planes * block.expansion
        self.layers = nn.Sequential(*blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inplanes, num_classes)

    def forward(self, x):
        x = self.layers(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class InvertedResidual(nn.Module):
    def __init__(self, inp, oup, stride, expand_ratio, kernel_num):
        super().__init__()
        hidden = inp * expand_ratio
        self.use_res_connect = stride == 1 and inp == oup
        layers = [_od_conv_bn(inp, hidden, 1, 1, 1, kernel_num)] if expand_ratio != 1 else []
        layers += [
            _od_conv_bn(hidden, hidden, 3, stride, hidden, kernel_num),
            nn.Sequential(ODConv2d(hidden, oup, 1, kernel_num=kernel_num), nn.BatchNorm2d(oup)),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.conv(x) if self.use_res_connect else self.conv(x)


def _od_conv_bn(inp, oup, kernel_size, stride, groups, kernel_num):
    conv = ODConv2d(inp, oup, kernel_size, stride, kernel_size // 2, groups, kernel_num)
    return nn.Sequential(conv, nn.BatchNorm2d(oup), nn.ReLU6(inplace=True))


class ODMobileNetV2(nn.Module):
    SETTING = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, kernel_num=1, width_mult=0.25, num_classes=10):
        super().__init__()
        channels = int(32 * width_mult)
        stem = nn.Conv2d(3, channels, 3, 2, 1, bias=False)
        features = [nn.Sequential(stem, nn.BatchNorm2d(channels), nn.ReLU6(inplace=True))]
        for t, c, n, s in self.SETTING:
            for i in range(n):
                oup = int(c * width_mult)
                features.append(InvertedResidual(channels, oup, s if i == 0 else 1, t, kernel_num))
                channels = oup
        features.append(_od_conv_bn(channels, 320, 1, 1, 1, kernel_num))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Linear(320, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))
